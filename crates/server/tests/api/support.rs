//! A small tokenizer and template, scripted engines, and requests without a socket.

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request as HttpRequest, StatusCode};
use serde_json::{Map, Value, json};
use thunder_engine::{
    Counters, Engine, Event, EventSender, Fault, FinishReason, Inbox, ModelFiles, ModelInfo, Output, Request,
    Sampling, Submission, TokenLogprob, Usage,
};
use thunder_model::chat::ChatTemplate;
use thunder_model::tokenizer::Tokenizer;
use thunder_server::{ServerConfig, router};
use tower::ServiceExt;

pub const MODEL: &str = "house/tiny-model";
/// The fixture's context, in tokens.
pub const CONTEXT: usize = 64;
/// The id of the fixture's only special token.
pub const END: u32 = 256;

/// Writes a tokenizer with one token per byte and `<|end|>`.
pub fn write_tokenizer(folder: &Path) {
    // Byte-level tokenizers write a byte as a printable character: the byte itself if it is
    // printable, otherwise a character from 256 up.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256..;
    let mut vocab = Map::new();
    for byte in 0..256 {
        let code = if printable(byte) { Some(byte) } else { others.next() };
        let character = code.and_then(char::from_u32).unwrap();
        vocab.insert(character.to_string(), byte.into());
    }
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{
            "id": END, "content": "<|end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false,
        }],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [],
        },
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{{ mood }}";
    std::fs::write(folder.join("tokenizer_config.json"), json!({"chat_template": template}).to_string())
        .unwrap();
}

pub fn info() -> ModelInfo {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path());
    ModelInfo {
        name: MODEL.into(),
        context_length: CONTEXT,
        vocab_size: 257,
        tokenizer: Arc::new(Tokenizer::load(folder.path()).unwrap()),
        chat_template: ChatTemplate::load(folder.path()).unwrap().map(Arc::new),
        default_sampling: Sampling { temperature: 0.6, ..Sampling::default() },
        eos: vec![END],
        pooling: Default::default(),
        kind: Default::default(),
        token_types: 1,
        digest: "5e".repeat(32),
        files: ModelFiles {
            family: "qwen3".into(),
            bytes: 4_500_000_000,
            weights: 8_000_000_000,
            is_quantized: true,
        },
        adapters: Vec::new(),
        ranks: 2,
    }
}

/// A request that counts as running until this is dropped.
struct Running(Arc<Counters>);

impl Running {
    fn new(counters: Arc<Counters>) -> Self {
        counters.running.fetch_add(1, Ordering::Relaxed);
        Self(counters)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A running request in its slot. Its last event frees the slot, or else dropping it does.
pub struct Slot {
    pub request: Request,
    pub events: EventSender,
    counters: Arc<Counters>,
    running: Cell<Option<Running>>,
}

impl Slot {
    pub fn delta(&self, text: &str) {
        let token = |byte: &u8| TokenLogprob {
            id: (*byte).into(),
            bytes: vec![*byte],
            logprob: -0.25,
            top: (0..self.request.logprobs.unwrap_or(0) as u8)
                .map(|i| ((b'a' + i).into(), vec![b'a' + i], -1.5))
                .collect(),
        };
        let logprobs = if self.request.logprobs.is_some() {
            text.as_bytes().iter().map(token).collect()
        } else {
            vec![]
        };
        self.send(Event::Delta { text: text.into(), logprobs });
    }

    /// A step has made tokens.
    pub fn count(&self, tokens: u64) {
        self.counters.generated_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    pub fn done(&self, reason: FinishReason, completion_tokens: usize) {
        let usage = Usage { prompt_tokens: self.request.prompt.len(), completion_tokens, ..Usage::default() };
        self.send(Event::Done { reason, usage });
    }

    pub fn fail(&self, message: &str) {
        self.send(Event::Failed { message: message.into(), fault: Fault::Engine });
    }

    /// The answer's grammar allows nothing more.
    pub fn fail_by_grammar(&self, message: &str) {
        self.send(Event::Failed { message: message.into(), fault: Fault::Request });
    }

    pub fn send(&self, event: Event) {
        // Before the event: tests read the counters as soon as they have it.
        if matches!(event, Event::Done { .. } | Event::Failed { .. }) {
            self.running.take();
        }
        // False if the client has disconnected; scripts ignore that, as engines do.
        self.events.send(event);
    }
}

/// An engine that runs `script` for each request, each on its own thread.
pub fn scripted(script: impl Fn(Slot) + Send + Sync + 'static) -> Engine {
    scripted_with(info(), script)
}

/// Like [`scripted`], with a context large enough for descriptions of tools.
pub fn scripted_with_tools(script: impl Fn(Slot) + Send + Sync + 'static) -> Engine {
    scripted_with(ModelInfo { context_length: 4096, ..info() }, script)
}

pub fn scripted_with(info: ModelInfo, script: impl Fn(Slot) + Send + Sync + 'static) -> Engine {
    let (engine, mut inbox) = Engine::channel(info, 16);
    let script = Arc::new(script);
    std::thread::spawn(move || {
        while let Some(Submission { request, events, .. }) = inbox.submissions.blocking_recv() {
            inbox.counters.waiting.fetch_sub(1, Ordering::Relaxed);
            let counters = inbox.counters.clone();
            counters.read_tokens.fetch_add(request.prompt.len() as u64, Ordering::Relaxed);
            let running = Cell::new(Some(Running::new(counters.clone())));
            let script = script.clone();
            std::thread::spawn(move || script(Slot { request, events, counters, running }));
        }
    });
    engine
}

/// An engine that holds all answers back until it is opened.
pub struct Held {
    pub engine: Engine,
    /// `max_tokens` of each request, in the order in which it got them.
    order: Arc<Mutex<Vec<Option<usize>>>>,
    /// Maximum number of requests that it had at the same time.
    pub most: Arc<AtomicUsize>,
    hold: Option<Sender<()>>,
}

impl Held {
    pub fn new() -> Self {
        let (hold, held) = channel::<()>();
        let (held, order, most) = (Mutex::new(held), Arc::default(), Arc::new(AtomicUsize::new(0)));
        let (of_script, peak, now) = (Arc::clone(&order), most.clone(), AtomicUsize::new(0));
        let engine = scripted(move |slot| {
            let order: &Mutex<Vec<Option<usize>>> = &of_script;
            order.lock().unwrap().push(slot.request.max_tokens);
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Fails as soon as the other end is dropped.
            let _ = held.lock().unwrap().recv();
            now.fetch_sub(1, Ordering::SeqCst);
            hello(slot);
        });
        Self { engine, order, most, hold: Some(hold) }
    }

    pub fn open(&mut self) {
        self.hold = None;
    }

    /// `max_tokens` of the requests that it got, in this order.
    pub fn order(&self) -> Vec<usize> {
        self.order.lock().unwrap().iter().flatten().copied().collect()
    }

    /// At which places it got requests of this many tokens.
    pub fn places(&self, tokens: usize) -> Vec<usize> {
        (0..).zip(self.order()).filter(|(_, of)| *of == tokens).map(|(place, _)| place).collect()
    }
}

/// Waits until something is so, for a minute at most.
pub async fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// An engine that accepts requests and sends no events.
pub fn silent(max_waiting: usize) -> (Engine, Inbox) {
    Engine::channel(info(), max_waiting)
}

/// A script that sends "Hello, wörld" in three deltas.
pub fn hello(slot: Slot) {
    for piece in ["Hello", ", ", "wörld"] {
        slot.delta(piece);
    }
    slot.done(FinishReason::Stop, 4);
}

/// A script that answers "Hello", or reports the requested numbers.
pub fn anything(slot: Slot) {
    match &slot.request.output {
        Output::Text => slot.delta("Hello"),
        Output::Hidden => slot.send(Event::Hidden { values: vec![3.0, 4.0, 0.0] }),
        Output::Likelihoods(ids) => slot.send(Event::Likelihoods { logprobs: vec![-1.0; ids.len()] }),
    }
    slot.done(FinishReason::Stop, 2);
}

/// A script that sends the request's seed, then its prompt.
pub fn echo(slot: Slot) {
    let prompt: Vec<u8> = slot.request.prompt.iter().map(|&id| id as u8).collect();
    slot.delta(&format!("{:?} {}", slot.request.sampling.seed, String::from_utf8_lossy(&prompt)));
    slot.done(FinishReason::Length, 3);
}

pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("not JSON: {}", self.text))
    }

    /// The data of a stream's events.
    pub fn events(&self) -> Vec<&str> {
        assert_eq!(self.headers["content-type"], "text/event-stream");
        let data = |event| str::strip_prefix(event, "data: ").unwrap_or_else(|| panic!("not data: {event}"));
        self.text.trim_end().split("\n\n").map(data).collect()
    }

    /// The chunks of a complete stream.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop(), Some("[DONE]"));
        events.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    /// Asserts OpenAI's error body and returns (message, type, param, code).
    pub fn error(&self) -> (String, String, Value, Value) {
        let body = self.json();
        let error = &body["error"];
        assert_eq!(error.as_object().map(Map::len), Some(4), "{body}");
        let text = |field: &str| error[field].as_str().unwrap_or_default().to_owned();
        (text("message"), text("type"), error["param"].clone(), error["code"].clone())
    }
}

pub async fn send(router: Router, request: HttpRequest<Body>) -> Reply {
    let exchange = async {
        let response = router.oneshot(request).await.unwrap();
        let (status, headers) = (response.status(), response.headers().clone());
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        Reply { status, headers, text: String::from_utf8(body.into()).unwrap() }
    };
    tokio::time::timeout(Duration::from_secs(20), exchange).await.expect("the server hangs")
}

pub fn post_request(path: &str, body: impl Into<Body>) -> HttpRequest<Body> {
    HttpRequest::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

pub async fn post(engine: &Engine, path: &str, body: Value) -> Reply {
    send(router(engine.clone(), ServerConfig::default()), post_request(path, body.to_string())).await
}

pub async fn get(engine: &Engine, path: &str) -> Reply {
    let request = HttpRequest::get(path).body(Body::empty()).unwrap();
    send(router(engine.clone(), ServerConfig::default()), request).await
}

/// A chat request's body: one user message, and the fields of `more`.
pub fn chat(more: Value) -> Value {
    with(json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}), more)
}

/// A completion request's body, with the fields of `more`.
pub fn completion(more: Value) -> Value {
    with(json!({"model": MODEL, "prompt": "hi"}), more)
}

fn with(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}
