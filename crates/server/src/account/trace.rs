//! An account as a trace: the request and its parts.

use std::time::{Duration, SystemTime};

use axum::http::HeaderMap;
use thunder_access::{Caller, Outcome, UsageRecord};
use thunder_engine::{RankWork, RequestWork, WorkTime};
use thunder_traces::{Attribute, Phase, RankTime, RequestTrace, Stage, TraceContext, Work};

use super::Open;

/// The trace named by a request, or a new one.
pub(super) fn context(headers: &HeaderMap) -> TraceContext {
    let given = headers.get("traceparent").and_then(|value| value.to_str().ok());
    given.and_then(TraceContext::parse).unwrap_or_default()
}

/// The engine's data about its ranks, in the form of traces.
pub(super) fn work_of(work: &RequestWork, queued: Duration) -> Work {
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let phase = |steps, of: fn(&RankWork) -> WorkTime| {
        let ranks = work.ranks.iter().map(of);
        let ranks = ranks.map(|WorkTime { computed, waited }| RankTime {
            computed_us: us(computed),
            waited_us: us(waited),
        });
        Phase { steps, ranks: ranks.collect() }
    };
    Work {
        queued_us: us(queued),
        stage_ranks: work.tensor_ranks,
        prefill: phase(work.prefill_steps, |rank| rank.prefill),
        decode: phase(work.decode_steps, |rank| rank.decode),
    }
}

/// Sends the trace of a closed account, if its caller wants it kept.
pub(super) fn send(open: &Open, caller: &Caller, record: &UsageRecord, work: Option<&Work>) {
    let Some((traces, context)) = open.app.config.traces.as_ref().zip(open.trace) else { return };
    if !context.is_sampled {
        return;
    }
    let duration = Duration::from_micros(record.duration_us);
    let mut stages = Vec::new();
    let mut from = Duration::ZERO;
    for (name, end) in [
        ("gateway", open.prepared),
        ("queue", open.passed),
        ("prefill", open.first_token),
        ("decode", open.first_token.map(|_| duration)),
    ] {
        let Some(end) = end else { break };
        stages.push(Stage::new(name, from, end));
        from = end;
    }
    if let Some(work) = work {
        let computed = record.prompt_tokens.saturating_sub(record.cached_tokens);
        work.add_to(&mut stages, [computed, record.completion_tokens], &[]);
    }
    // Names of OpenTelemetry's conventions for HTTP and for generative models.
    let mut attributes = vec![
        Attribute::Text("http.request.method", "POST".to_owned()),
        Attribute::Text("http.route", record.api.clone()),
        Attribute::Integer("http.response.status_code", record.status.into()),
        Attribute::Text("gen_ai.operation.name", "chat".to_owned()),
        Attribute::Text("gen_ai.request.model", record.model.clone()),
        Attribute::Text("gen_ai.response.id", record.id.clone()),
        Attribute::Text("gen_ai.response.finish_reasons", record.outcome.name().to_owned()),
        Attribute::Integer("gen_ai.usage.input_tokens", record.prompt_tokens),
        Attribute::Integer("gen_ai.usage.output_tokens", record.completion_tokens),
        Attribute::Integer("thunder.cached_tokens", record.cached_tokens),
        Attribute::Integer("thunder.ranks", open.app.engine.info().ranks as u64),
    ];
    if let Some(key) = caller.key() {
        attributes.push(Attribute::Text("thunder.key", key.name.clone()));
        attributes.extend(key.team.clone().map(|team| Attribute::Text("thunder.team", team)));
    }
    let failure = (record.outcome == Outcome::Failed).then(|| "the engine failed".to_owned());
    let began = SystemTime::now().checked_sub(duration).unwrap_or(SystemTime::UNIX_EPOCH);
    let name = format!("POST {}", record.api);
    traces.send(RequestTrace { context, name, began, duration, stages, attributes, failure });
}
