use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::SystemTime;

use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn trace(context: TraceContext) -> RequestTrace {
    let ms = Duration::from_millis;
    RequestTrace {
        context,
        name: "POST /v1/chat/completions".into(),
        began: SystemTime::UNIX_EPOCH + ms(1_000_000),
        duration: ms(500),
        stages: vec![Stage::new("queue", ms(5), ms(100)), Stage::new("prefill", ms(100), ms(200))],
        attributes: vec![Attribute::Integer("gen_ai.usage.input_tokens", 7)],
        failure: None,
    }
}

/// A collector that answers each message with `status`, and passes the message on.
fn collector(status: &'static str) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut bytes = Vec::new();
            let whole = |bytes: &[u8]| {
                let text = String::from_utf8_lossy(bytes).into_owned();
                let (head, body) = text.split_once("\r\n\r\n")?;
                let length = head.lines().find_map(|line| {
                    line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok()
                });
                (body.len() == length?).then_some(text)
            };
            let text = loop {
                if let Some(text) = whole(&bytes) {
                    break text;
                }
                let mut piece = [0; 4096];
                let count = stream.read(&mut piece).unwrap();
                bytes.extend_from_slice(&piece[..count]);
            };
            write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}")
                .unwrap();
            sender.send(text).unwrap();
        }
    });
    (address, receiver)
}

#[test]
fn a_collector_receives_spans_that_belong_together() {
    let (address, received) = collector("200 OK");
    let traces = Traces::start(&address, &["x-key=secret".into()], "thunder").unwrap();
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    traces.send(trace(TraceContext::parse(parent).unwrap()));
    drop(traces);
    let message = received.recv_timeout(Duration::from_secs(10)).unwrap();
    let (head, body) = message.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /v1/traces ") && head.contains("x-key: secret"), "{head}");
    let body: Value = serde_json::from_str(body).unwrap();
    let resource = &body["resourceSpans"][0];
    assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "thunder");
    let spans = resource["scopeSpans"][0]["spans"].as_array().unwrap();
    assert_eq!(spans.len(), 3);
    assert!(spans.iter().all(|span| span["traceId"] == "0af7651916cd43dd8448eb211c80319c"));
    assert_eq!((&spans[0]["parentSpanId"], &spans[0]["kind"]), (&"b7ad6b7169203331".into(), &2.into()));
    assert!(spans[1..].iter().all(|span| span["parentSpanId"] == spans[0]["spanId"]));
    assert_eq!(spans[1]["startTimeUnixNano"], "1000005000000");
    assert_eq!(spans[0]["endTimeUnixNano"], "1000500000000");
    assert_eq!(spans[0]["attributes"][0]["value"]["intValue"], "7");
}

#[test]
fn a_collector_that_refuses_costs_traces_and_nothing_else() {
    let (address, received) = collector("503 Busy");
    let traces = Traces::start(&address, &[], "thunder").unwrap();
    traces.send(trace(TraceContext::new()));
    received.recv_timeout(Duration::from_secs(10)).unwrap();
    let began = Instant::now();
    while traces.dropped() == 0 {
        assert!(began.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(traces.dropped(), 1);
}

#[test]
fn what_cannot_work_is_refused_at_start() {
    for bad in [
        "",
        "127.0.0.1:4318",
        "localhost:4318",
        "ftp://127.0.0.1:4318",
        "http:/127.0.0.1:4318",
        "http://",
        "http://:4318",
        "http:///v1/traces",
        "http://host:99999",
        "http://host:0",
        "http://host:port",
        "http://host:",
        "http://a b:4318",
        "http://host:4318/?x=1",
        "nonsense",
    ] {
        let error = Traces::start(bad, &[], "x").unwrap_err().to_string();
        assert!(error.contains(&format!("\"{bad}\"")) && error.contains("http://127.0.0.1:4318"), "{error}");
    }
    let secret = Traces::start("http://me:hush@host:x", &[], "x").unwrap_err().to_string();
    assert!(!secret.contains("hush"), "{secret}");
    for good in [
        "http://127.0.0.1:4318",
        "https://otel.example",
        "https://me:hush@otel.example:443/base/",
        "http://[::1]:4318",
        "HTTP://localhost:1",
    ] {
        assert_eq!(Traces::check(good, &[]).unwrap(), [], "{good}");
    }
    for bad in ["secret", "=x", "a b=c", "a=b\r\nc: d"] {
        assert!(matches!(Traces::start("http://x", &[bad.into()], "x"), Err(TracesError::Header(1))));
    }
}

#[test]
fn malformed_parents_are_ignored() {
    for bad in [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
    ] {
        assert_eq!(TraceContext::parse(bad), None, "{bad}");
    }
    let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-what";
    assert_eq!(TraceContext::parse(later).map(|context| context.is_sampled), Some(false));
}

proptest! {
    #[test]
    fn any_header_is_read_or_ignored(text in "[ -~]{0,80}") {
        let _ = TraceContext::parse(&text);
    }
}

#[test]
fn ranks_are_spans_below_prefill_and_decoding_and_below_their_stage_of_a_pipeline() {
    let ms = Duration::from_millis;
    let time = |us| RankTime { computed_us: us, waited_us: us / 10 };
    let phase = |steps| Phase { steps, ranks: (1..=4).map(|rank| time(1000 * rank)).collect() };
    let nodes: Vec<String> = ["ant", "bee"].map(str::to_owned).into();
    for (stage_ranks, depth) in [(4, 1), (2, 2)] {
        let work = Work { queued_us: 5, stage_ranks, prefill: phase(3), decode: phase(9) };
        assert_eq!(serde_json::from_value::<Work>(serde_json::to_value(&work).unwrap()).unwrap(), work);
        let mut trace = trace(TraceContext::new());
        trace.stages.push(Stage::new("decode", ms(200), ms(500)));
        work.add_to(&mut trace.stages, [7, 20], &nodes);
        let document = document::document("thunder", &[trace]);
        let spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap();
        let value = |span: &Value, name: &str| {
            let all = span["attributes"].as_array().unwrap();
            let found = all.iter().find(|one| one["key"] == name).map(|one| one["value"].clone());
            found
                .map(|value| value["intValue"].as_str().or(value["stringValue"].as_str()).unwrap().to_owned())
        };
        // The names of a span and of those above it.
        let path = |span: &Value| {
            let mut names = vec![span["name"].as_str().unwrap().to_owned()];
            let mut parent = span["parentSpanId"].clone();
            while let Some(above) = spans.iter().find(|one| one["spanId"] == parent) {
                names.push(above["name"].as_str().unwrap().to_owned());
                parent = above["parentSpanId"].clone();
            }
            names
        };
        let ranks: Vec<&Value> = spans.iter().filter(|span| span["name"] == "rank").collect();
        assert_eq!(ranks.len(), 8);
        for (nth, rank) in ranks.iter().enumerate() {
            let (phase, steps, tokens) = if nth < 4 { ("prefill", "3", "7") } else { ("decode", "9", "20") };
            let names = path(rank);
            assert_eq!(names.len(), 2 + depth, "{names:?}");
            assert_eq!(names[depth], phase);
            let values = ["thunder.rank", "thunder.steps", "thunder.tokens", "thunder.computed_us"];
            let number = nth % 4;
            let expected =
                [number.to_string(), steps.into(), tokens.into(), format!("{}", 1000 * (number + 1))];
            assert_eq!(values.map(|name| value(rank, name).unwrap()), expected);
            assert_eq!(value(rank, "thunder.node"), nodes.get(number).cloned());
            let [begin, end] = ["startTimeUnixNano", "endTimeUnixNano"].map(|name| rank[name].as_str());
            assert!(begin < end, "{rank}");
        }
        let stages: Vec<_> = spans.iter().filter_map(|span| value(span, "thunder.stage")).collect();
        assert_eq!(stages, if depth == 2 { vec!["0", "1", "0", "1"] } else { vec![] });
    }
}
