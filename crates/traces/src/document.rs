//! Spans as OTLP's JSON document (opentelemetry-proto, `ExportTraceServiceRequest`).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::context::{TraceContext, new_id};

/// OTLP's number for a span that serves a request, and for one inside of the program.
const SERVER_KIND: u8 = 2;
const INTERNAL_KIND: u8 = 1;
/// OTLP's number for a status of failure.
const ERROR_STATUS: u8 = 2;

/// A named value of a span.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    /// A text.
    Text(&'static str, String),
    /// An integer.
    Integer(&'static str, u64),
}

/// A part of a request's time.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    /// Its name.
    pub name: &'static str,
    /// From the request's begin to the stage's.
    pub begin: Duration,
    /// From the request's begin to the stage's end.
    pub end: Duration,
    /// What is known of it.
    pub attributes: Vec<Attribute>,
    /// Its own parts.
    pub parts: Vec<Stage>,
}

impl Stage {
    /// A stage without further data.
    pub fn new(name: &'static str, begin: Duration, end: Duration) -> Self {
        Self { name, begin, end, attributes: Vec::new(), parts: Vec::new() }
    }
}

/// A request with its stages.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestTrace {
    /// The trace that it belongs to.
    pub context: TraceContext,
    /// Method and path.
    pub name: String,
    /// When it began.
    pub began: SystemTime,
    /// How long it took.
    pub duration: Duration,
    /// Its stages.
    pub stages: Vec<Stage>,
    /// What is known of it.
    pub attributes: Vec<Attribute>,
    /// Why it failed, if it did.
    pub failure: Option<String>,
}

/// The message with these traces.
pub(crate) fn document(service: &str, traces: &[RequestTrace]) -> Value {
    let spans: Vec<Value> = traces.iter().flat_map(spans).collect();
    let resource = [
        Attribute::Text("service.name", service.to_owned()),
        Attribute::Text("service.version", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    json!({"resourceSpans": [{
        "resource": {"attributes": attributes(&resource)},
        "scopeSpans": [{"scope": {"name": "thunderhead"}, "spans": spans}],
    }]})
}

fn spans(trace: &RequestTrace) -> Vec<Value> {
    let began = trace.began.duration_since(UNIX_EPOCH).unwrap_or_default();
    // 64-bit integers are texts in protobuf's JSON.
    let at = |offset: Duration| (began + offset).as_nanos().to_string();
    let (trace_id, id) = (format!("{:032x}", trace.context.trace), format!("{:016x}", new_id()));
    let mut root = json!({
        "traceId": trace_id,
        "spanId": id,
        "name": trace.name,
        "kind": SERVER_KIND,
        "startTimeUnixNano": at(Duration::ZERO),
        "endTimeUnixNano": at(trace.duration),
        "attributes": attributes(&trace.attributes),
    });
    if let Some(parent) = trace.context.parent {
        root["parentSpanId"] = format!("{parent:016x}").into();
    }
    if let Some(why) = &trace.failure {
        root["status"] = json!({"code": ERROR_STATUS, "message": why});
    }
    let mut spans = vec![root];
    add_stages(&mut spans, &trace.stages, (&trace_id, &id), &at);
    spans
}

fn add_stages(
    spans: &mut Vec<Value>,
    stages: &[Stage],
    (trace_id, parent): (&str, &str),
    at: &impl Fn(Duration) -> String,
) {
    for stage in stages {
        let id = format!("{:016x}", new_id());
        spans.push(json!({
            "traceId": trace_id,
            "spanId": id,
            "parentSpanId": parent,
            "name": stage.name,
            "kind": INTERNAL_KIND,
            "startTimeUnixNano": at(stage.begin),
            "endTimeUnixNano": at(stage.end.max(stage.begin)),
            "attributes": attributes(&stage.attributes),
        }));
        add_stages(spans, &stage.parts, (trace_id, &id), at);
    }
}

fn attributes(attributes: &[Attribute]) -> Value {
    let one = |attribute: &Attribute| match attribute {
        Attribute::Text(name, value) => json!({"key": name, "value": {"stringValue": value}}),
        Attribute::Integer(name, value) => json!({"key": name, "value": {"intValue": value.to_string()}}),
    };
    attributes.iter().map(one).collect()
}
