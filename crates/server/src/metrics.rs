//! The metrics of `/metrics` for Prometheus. A metric with the same meaning as one of vLLM's has
//! vLLM's name, so dashboards for vLLM fit.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use thunder_access::{Access, Gate, LimitKind};
use thunder_dashboard::{Ask, Extension};
use thunder_engine::{Engine, Event, Fault, FinishReason, Usage};

use crate::account::own::{OwnTime, Part};
use crate::config::ServerConfig;

/// Media type of [`Metrics::text`].
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Upper bounds in seconds, as in vLLM: for the time to the first token, the time between tokens,
/// and whole requests.
const FIRST_TOKEN_S: [f64; 18] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0];
const NEXT_TOKEN_S: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// Upper bounds in seconds of the gateway's own time. Its goal is 0.3 ms for 99 of 100 requests.
const OWN_S: [f64; 20] = [
    0.000_01, 0.000_02, 0.000_03, 0.000_05, 0.000_075, 0.000_1, 0.000_15, 0.000_2, 0.000_25, 0.000_3,
    0.000_4, 0.000_5, 0.000_75, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
];
const REQUEST_S: [f64; 14] = [0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 240.0, 960.0];

/// vLLM's reason of requests that were cancelled.
const ABORT: &str = "abort";

/// Upper bounds of tokens in a prompt or an answer, as in vLLM for a context of 128 Ki.
const TOKENS: [f64; 17] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0,
    50_000.0, 100_000.0, 200_000.0,
];

/// Counters and times of all requests since the server started.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    finished: Family<FinishedLabels, Counter>,
    failed: Counter,
    wrong: Counter,
    refused: Family<RefusedLabels, Counter>,
    first_token: Histogram,
    next_token: Histogram,
    request: Histogram,
    decode: Histogram,
    prompt_lengths: Histogram,
    answer_lengths: Histogram,
    own: Histogram,
    computed: Histogram,
    own_parts: Family<PartLabels, Histogram, fn() -> Histogram>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PartLabels {
    part: &'static str,
}

fn own_times() -> Histogram {
    Histogram::new(OWN_S)
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishedLabels {
    finished_reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusedLabels {
    /// Of a key, a team or a model.
    scope: &'static str,
    limit: &'static str,
}

impl Metrics {
    /// Metrics of the engine's model, all zero.
    pub fn new(engine: &Engine, config: &ServerConfig) -> Self {
        let (access, gate) = (config.access.as_ref(), config.gate.as_ref());
        let model = ("model_name".into(), engine.info().name.clone().into());
        let mut registry = Registry::with_labels([model].into_iter());
        let metrics = Self {
            finished: Family::default(),
            failed: Counter::default(),
            wrong: Counter::default(),
            refused: Family::default(),
            first_token: Histogram::new(FIRST_TOKEN_S),
            next_token: Histogram::new(NEXT_TOKEN_S),
            request: Histogram::new(REQUEST_S),
            decode: Histogram::new(REQUEST_S),
            prompt_lengths: Histogram::new(TOKENS),
            answer_lengths: Histogram::new(TOKENS),
            own: own_times(),
            computed: own_times(),
            own_parts: Family::new_with_constructor(own_times),
            registry: Registry::default(),
        };
        let counters = [
            ("thunder:request_failures", "Requests that ended with an error of the server", &metrics.failed),
            (
                "thunder:requests_wrong",
                "Requests that ended with an error of their own: their grammar, or a client that does not read",
                &metrics.wrong,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let help = "Requests that ended without an error: whole, cut off by a length, or cancelled (abort)";
        registry.register("vllm:request_success", help, metrics.finished.clone());
        let refused = metrics.refused.clone();
        registry.register("thunder:requests_refused", "Requests that a limit refused", refused);
        let times = [
            ("vllm:time_to_first_token", "From submission to the first token", &metrics.first_token),
            ("vllm:inter_token_latency", "Mean time between a request's tokens", &metrics.next_token),
            ("vllm:e2e_request_latency", "From submission to the last token", &metrics.request),
            ("vllm:request_decode_time", "From the first token to the last", &metrics.decode),
            (
                "thunder:gateway_own",
                "What the gateway itself takes for a request, without the engine and its queue",
                &metrics.own,
            ),
            (
                "thunder:gateway_computed",
                "What the gateway's threads compute in that time, without waits for a core",
                &metrics.computed,
            ),
        ];
        for (name, help, histogram) in times {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let lengths = [
            ("vllm:request_prompt_tokens", "Tokens of a request's prompt", &metrics.prompt_lengths),
            ("vllm:request_generation_tokens", "Tokens of a request's answer", &metrics.answer_lengths),
        ];
        for (name, help, histogram) in lengths {
            registry.register(name, help, histogram.clone());
        }
        let parts = metrics.own_parts.clone();
        let help = "The gateway's own time by its part; wait is no part of the sum: it is for other requests";
        registry.register_with_unit("thunder:gateway_own_part", help, Unit::Seconds, parts);
        registry.register_collector(Box::new(EngineLoad(engine.clone(), access.cloned(), gate.cloned())));
        registry.register_collector(Box::new(Drawn(config.extension.clone())));
        // Rates begin with the first request, not with the second.
        for finished_reason in ["stop", "length", ABORT] {
            let _ = metrics.finished.get_or_create(&FinishedLabels { finished_reason });
        }
        for part in Part::ALL {
            let _ = metrics.own_parts.get_or_create(&PartLabels { part: part.name() });
        }
        let limit = LimitKind::RequestsPerMinute.name();
        let _ = metrics.refused.get_or_create(&RefusedLabels { scope: "key", limit });
        Self { registry, ..metrics }
    }

    /// Counts the end of an answer; other events change nothing.
    fn note(&self, event: &Event) {
        match event {
            Event::Done { reason, usage } => self.note_done(*reason, usage),
            Event::Failed { fault: Fault::Engine, .. } => {
                self.failed.inc();
            }
            Event::Failed { fault: Fault::Request, .. } => {
                self.wrong.inc();
            }
            _ => {}
        }
    }

    /// Counts a request that a limit refused.
    pub fn note_refusal(&self, scope: &'static str, limit: LimitKind) {
        self.refused.get_or_create(&RefusedLabels { scope, limit: limit.name() }).inc();
    }

    /// Counts the gateway's own time for a request.
    pub fn note_own(&self, own: &OwnTime) {
        self.own.observe(own.total().as_secs_f64());
        self.computed.observe(own.computed().as_secs_f64());
        for part in Part::ALL {
            let seconds = own.of(part).as_secs_f64();
            self.own_parts.get_or_create(&PartLabels { part: part.name() }).observe(seconds);
        }
    }

    /// Requests that were answered.
    pub fn answered(&self) -> u64 {
        let of = |finished_reason| self.finished.get_or_create(&FinishedLabels { finished_reason }).get();
        of("stop") + of("length")
    }

    /// Counts requests whose client left, or whose time was over, before their answers ended.
    fn note_aborted(&self, requests: usize) {
        if requests > 0 {
            let labels = FinishedLabels { finished_reason: ABORT };
            self.finished.get_or_create(&labels).inc_by(requests as u64);
        }
    }

    fn note_done(&self, reason: FinishReason, usage: &Usage) {
        let finished_reason = match reason {
            FinishReason::Stop | FinishReason::StopText(_) => "stop",
            FinishReason::Length => "length",
        };
        self.finished.get_or_create(&FinishedLabels { finished_reason }).inc();
        let (first, rest) = (usage.time_to_first_token.as_secs_f64(), usage.decode_time.as_secs_f64());
        self.first_token.observe(first);
        self.request.observe(first + rest);
        self.decode.observe(rest);
        self.prompt_lengths.observe(usage.prompt_tokens as f64);
        self.answer_lengths.observe(usage.completion_tokens as f64);
        if usage.completion_tokens > 1 {
            self.next_token.observe(rest / (usage.completion_tokens - 1) as f64);
        }
    }

    /// All metrics, as text.
    ///
    /// # Errors
    /// Never in practice: a String takes any text.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Requests of the engine whose ends are counted: one that has none when this is dropped was
/// cancelled, unless the answer that they are for has failed.
#[derive(Debug)]
pub(crate) struct Counted {
    metrics: Arc<Metrics>,
    open: usize,
}

impl Counted {
    /// For `requests` that the engine gets, or will get.
    pub fn new(metrics: &Arc<Metrics>, requests: usize) -> Self {
        Self { metrics: metrics.clone(), open: requests }
    }

    /// The engine has refused those that have not ended.
    pub fn forget(&mut self) {
        self.open = 0;
    }

    /// Counts the end of an answer; other events change nothing. One failure ends them all.
    pub fn note(&mut self, event: &Event) {
        match event {
            Event::Done { .. } => self.open = self.open.saturating_sub(1),
            Event::Failed { .. } => self.open = 0,
            _ => {}
        }
        self.metrics.note(event);
    }

    /// The answer took too long, which counts as a failure of the server.
    pub fn note_late(&mut self) {
        self.forget();
        self.metrics.failed.inc();
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.metrics.note_aborted(self.open);
    }
}

/// The machine's power, as far as the program around the server knows it.
#[derive(Debug)]
struct Drawn(Option<Arc<dyn Extension>>);

impl Collector for Drawn {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let ask = Ask { method: "GET", path: "/admin/energy", body: &[] };
        let Some(energy) = self.0.as_ref().and_then(|extension| extension.answer(&ask)) else {
            return Ok(());
        };
        if let Some(joules) = energy.body["joules"].as_f64() {
            let counter = ConstCounter::new(joules);
            let help = "What the machine has drawn since the start, measured or by --watts";
            let kind = counter.metric_type();
            counter.encode(encoder.encode_descriptor(
                "thunder:energy",
                help,
                Some(&Unit::Joules),
                kind,
            )?)?;
        }
        if let Some(watts) = energy.body["watts"].as_f64() {
            let gauge = ConstGauge::new(watts);
            let kind = gauge.metric_type();
            let help = "What the machine draws, measured or by --watts";
            gauge.encode(encoder.encode_descriptor("thunder:power_watts", help, None, kind)?)?;
        }
        Ok(())
    }
}

/// The engine's own counters, read when Prometheus asks.
#[derive(Debug)]
struct EngineLoad(Engine, Option<Access>, Option<Gate>);

impl Collector for EngineLoad {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (engine, counters) = (&self.0, self.0.counters());
        let (running, waiting) = engine.load();
        let blocks = counters.kv_blocks.load(Ordering::Relaxed).max(1);
        let used = counters.kv_blocks_used.load(Ordering::Relaxed) as f64 / blocks as f64;
        let on_disk = counters.disk_bytes.load(Ordering::Relaxed) as f64;
        let gauges = [
            ("thunder:disk_cache_bytes", "Bytes that all ranks have in --cache-dir", on_disk),
            ("vllm:num_requests_running", "Requests that are computed", running as f64),
            ("vllm:num_requests_waiting", "Requests that wait for a slot", waiting as f64),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1", used),
        ];
        let access = self.1.as_ref();
        let gate = self.2.as_ref().or(access.and_then(Access::gate));
        let queued = gate.map_or(0, Gate::waiting);
        let is_failing = access.is_some_and(Access::is_failing);
        let kept = [
            ("thunder:requests_queued", "Requests that wait for their team's turn", queued as f64),
            (
                "thunder:usage_recording_failing",
                "1 if requests are refused because the store's disk takes no records",
                f64::from(u8::from(is_failing)),
            ),
        ];
        for (name, help, value) in gauges.into_iter().chain(kept) {
            let gauge = ConstGauge::new(value);
            let encoder = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(encoder)?;
        }
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let read = count(&counters.read_tokens);
        let counts = [
            (
                "vllm:prompt_tokens",
                "Prompt tokens, counted as steps read them or find them in the cache",
                read,
            ),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", read),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache",
                count(&counters.cached_tokens),
            ),
            (
                "vllm:generation_tokens",
                "Tokens generated, counted as steps make them",
                count(&counters.generated_tokens),
            ),
            ("vllm:num_preemptions", "Requests that lost their slot for a while", count(&counters.preempted)),
            (
                "vllm:spec_decode_num_draft_tokens",
                "Tokens that were guessed and verified",
                count(&counters.drafted),
            ),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Guesses that were right",
                count(&counters.drafts_right),
            ),
            (
                "thunder:draft_model_tokens",
                "Tokens that a draft model guessed and that were verified",
                count(&counters.model_drafted),
            ),
            (
                "thunder:draft_model_accepted_tokens",
                "Guesses of a draft model that were right",
                count(&counters.model_drafts_right),
            ),
            (
                "thunder:disk_cache_tokens",
                "Prompt tokens that were read from --cache-dir",
                count(&counters.disk_tokens),
            ),
            (
                "thunder:disk_cache_written",
                "Blocks and states that all ranks wrote to --cache-dir",
                count(&counters.disk_written),
            ),
            (
                "thunder:disk_cache_dropped",
                "Blocks and states that ranks did not write: their disks were behind or full",
                count(&counters.disk_dropped),
            ),
            (
                "thunder:disk_cache_damaged",
                "Files of --cache-dir that ranks found damaged and removed",
                count(&counters.disk_damaged),
            ),
            ("thunder:steps", "Forward passes", count(&counters.steps)),
        ];
        for (name, help, value) in counts {
            let counter = ConstCounter::new(value);
            let encoder: MetricEncoder<'_> =
                encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(encoder)?;
        }
        Ok(())
    }
}
