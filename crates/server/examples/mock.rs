//! A server without a model: it generates words chosen by a hash of the prompt.
//!
//! Client developers can use the API without the hardware. The code shows how an engine sends its
//! events (`complete`). The server needs a folder with a tokenizer and, for chat, a chat template:
//!
//! ```text
//! cargo run --release -p thunder-server --example mock -- FOLDER 8000
//! ```

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thunder_engine::{
    Engine, Event, EventSender, FinishReason, ModelInfo, Request, Sampling, Submission, TokenLogprob, Usage,
};
use thunder_model::chat::ChatTemplate;
use thunder_model::tokenizer::Tokenizer;
use thunder_server::{ServerConfig, serve};
use tokio::sync::watch;

const CONTEXT: usize = 1024;
const WORDS: &[&str] =
    &["ranks", "links", "weights", "tokens", "cables", "thunder", "kernels", "pages", "clouds"];
/// Time per token.
const PACE: Duration = Duration::from_millis(1);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: mock FOLDER [PORT]")?;
    let port = arguments.next().map_or(Ok(8000), |port| port.parse())?;
    let tokenizer = Tokenizer::load(Path::new(&folder))?;
    // Above every token id of the tokenizer. A real engine reads it from the model's config.json.
    let vocab_size = 1 << 18;
    let info = ModelInfo {
        name: "mock".into(),
        context_length: CONTEXT,
        vocab_size,
        tokenizer: Arc::new(tokenizer),
        chat_template: ChatTemplate::load(Path::new(&folder))?.map(Arc::new),
        default_sampling: Sampling::default(),
        eos: Vec::new(),
        pooling: Default::default(),
        kind: Default::default(),
        token_types: 1,
        digest: "5e".repeat(32),
        files: Default::default(),
        adapters: Vec::new(),
        ranks: 1,
    };
    let (engine, mut inbox) = Engine::channel(info, 256);
    let tokenizer = engine.info().tokenizer.clone();
    std::thread::spawn(move || {
        while let Some(Submission { request, events, .. }) = inbox.submissions.blocking_recv() {
            let (counters, tokenizer) = (inbox.counters.clone(), tokenizer.clone());
            std::thread::spawn(move || {
                counters.waiting.fetch_sub(1, Ordering::Relaxed);
                counters.running.fetch_add(1, Ordering::Relaxed);
                complete(&request, &events, &tokenizer);
                counters.running.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("serving \"mock\" on http://{}", listener.local_addr()?);
    serve(engine, listener, watch::channel(ServerConfig::default()).1, std::future::pending()).await?;
    Ok(())
}

/// Sends the events of one request; returns early when the client has disconnected.
fn complete(request: &Request, events: &EventSender, tokenizer: &Arc<Tokenizer>) {
    let free = CONTEXT - request.prompt.len();
    let limit = request.max_tokens.unwrap_or(free).min(free);
    let ids = choose_tokens(request, tokenizer, limit);
    let full_text = tokenizer.decode(&ids, true);
    let stop = request.stop.iter().filter_map(|stop| full_text.find(stop)).min();
    let (mut stream, mut sent_bytes, mut tokens) = (tokenizer.stream(), 0, 0);
    for &id in &ids {
        std::thread::sleep(PACE);
        tokens += 1;
        let mut text = stream.push(id);
        let until_stop = stop.unwrap_or(usize::MAX) - sent_bytes;
        let stopped = text.len() >= until_stop;
        text.truncate(until_stop);
        sent_bytes += text.len();
        let logprobs = request.logprobs.map(|top| logprob(id, top, tokenizer)).into_iter().collect();
        if !events.send(Event::Delta { text, logprobs }) {
            return;
        }
        if stopped {
            break;
        }
    }
    let usage = Usage { prompt_tokens: request.prompt.len(), completion_tokens: tokens, ..Usage::default() };
    let reason = if stop.is_none() && tokens == limit { FinishReason::Length } else { FinishReason::Stop };
    // False when the client has disconnected, which is not an error.
    events.send(Event::Done { reason, usage });
}

/// At most `limit` tokens. The words depend on the prompt, and on the seed unless the request is
/// greedy.
fn choose_tokens(request: &Request, tokenizer: &Tokenizer, limit: usize) -> Vec<u32> {
    let seed = request.sampling.seed.filter(|_| request.sampling.temperature > 0.0);
    let words = if request.ignore_eos { limit } else { 12.min(limit) };
    let mut ids = Vec::new();
    for place in 0..words {
        let mut hasher = DefaultHasher::new();
        (&request.prompt, seed, place).hash(&mut hasher);
        let word = WORDS[hasher.finish() as usize % WORDS.len()];
        ids.extend(tokenizer.encode(&format!(" {word}"), false).unwrap_or_default());
    }
    ids.truncate(limit);
    ids
}

fn logprob(id: u32, top: usize, tokenizer: &Tokenizer) -> TokenLogprob {
    let likely = |place: usize| -0.1 - place as f32;
    let others = (0..).filter(|&other| other != id);
    let top = std::iter::once(id).chain(others).take(top).enumerate();
    let top = top.map(|(place, id)| (id, tokenizer.token_bytes(id), likely(place))).collect();
    TokenLogprob { id, bytes: tokenizer.token_bytes(id), logprob: likely(0), top }
}
