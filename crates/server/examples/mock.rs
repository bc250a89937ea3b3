//! A server without a model: it answers with words drawn by hash, at once, as often as you like.
//!
//! For developers of clients, who want the API without the hardware; and to see how something that makes tokens gets
//! behind the API, which is [`answer`]. Any folder with a tokenizer and a chat template will do:
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
    Engine, Event, FinishReason, ModelInfo, Request, Sampling, Submission, TokenLogprob, Usage,
};
use thunder_model::chat::ChatTemplate;
use thunder_model::tokenizer::Tokenizer;
use thunder_server::{ServerConfig, serve};
use tokio::sync::mpsc::UnboundedSender;

const CONTEXT: usize = 1024;
const WORDS: &[&str] =
    &["ranks", "links", "weights", "tokens", "cables", "thunder", "kernels", "pages", "clouds"];
/// Time that a token takes.
const PACE: Duration = Duration::from_millis(1);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: mock FOLDER [PORT]")?;
    let port = arguments.next().map_or(Ok(8000), |port| port.parse())?;
    let tokenizer = Tokenizer::load(Path::new(&folder))?;
    // Any id that words can have is below this; a model's config.json would say how many there are.
    let vocab_size = 1 << 18;
    let info = ModelInfo {
        name: "mock".into(),
        context_length: CONTEXT,
        vocab_size,
        tokenizer: Arc::new(tokenizer),
        chat_template: ChatTemplate::load(Path::new(&folder))?.map(Arc::new),
        default_sampling: Sampling::default(),
        ranks: 1,
    };
    let (engine, mut inbox) = Engine::channel(info, 256);
    let tokenizer = engine.info().tokenizer.clone();
    std::thread::spawn(move || {
        while let Some(Submission { request, events }) = inbox.submissions.blocking_recv() {
            let (counters, tokenizer) = (inbox.counters.clone(), tokenizer.clone());
            std::thread::spawn(move || {
                counters.waiting.fetch_sub(1, Ordering::Relaxed);
                counters.running.fetch_add(1, Ordering::Relaxed);
                answer(&request, &events, &tokenizer);
                counters.running.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("serving \"mock\" on http://{}", listener.local_addr()?);
    serve(engine, listener, ServerConfig::default(), std::future::pending()).await?;
    Ok(())
}

/// Sends the events of one request; returns early when the client is gone.
fn answer(request: &Request, events: &UnboundedSender<Event>, tokenizer: &Arc<Tokenizer>) {
    let room = CONTEXT - request.prompt.len();
    let most = request.max_tokens.unwrap_or(room).min(room);
    let ids = draw(request, tokenizer, most);
    let whole = tokenizer.decode(&ids, true);
    let stop = request.stop.iter().filter_map(|stop| whole.find(stop)).min();
    let (mut stream, mut said, mut taken) = (tokenizer.stream(), 0, 0);
    for &id in &ids {
        std::thread::sleep(PACE);
        taken += 1;
        let mut text = stream.push(id);
        let room = stop.unwrap_or(usize::MAX) - said;
        let stopped = text.len() >= room;
        text.truncate(room);
        said += text.len();
        let logprobs = request.logprobs.map(|top| logprob(id, top, tokenizer)).into_iter().collect();
        if events.send(Event::Delta { text, logprobs }).is_err() {
            return;
        }
        if stopped {
            break;
        }
    }
    let usage = Usage { prompt_tokens: request.prompt.len(), completion_tokens: taken, ..Usage::default() };
    let reason = if stop.is_none() && taken == most { FinishReason::Length } else { FinishReason::Stop };
    // Nobody may be there to hear it.
    let _ = events.send(Event::Done { reason, usage });
}

/// At most `most` tokens of words that follow from the prompt, and from the seed if the request is not greedy.
fn draw(request: &Request, tokenizer: &Tokenizer, most: usize) -> Vec<u32> {
    let seed = request.sampling.seed.filter(|_| request.sampling.temperature > 0.0);
    let words = if request.ignore_eos { most } else { 12.min(most) };
    let mut ids = Vec::new();
    for place in 0..words {
        let mut hasher = DefaultHasher::new();
        (&request.prompt, seed, place).hash(&mut hasher);
        let word = WORDS[hasher.finish() as usize % WORDS.len()];
        ids.extend(tokenizer.encode(&format!(" {word}"), false).unwrap_or_default());
    }
    ids.truncate(most);
    ids
}

fn logprob(id: u32, top: usize, tokenizer: &Tokenizer) -> TokenLogprob {
    let likely = |place: usize| -0.1 - place as f32;
    let others = (0..).filter(|&other| other != id);
    let top = std::iter::once(id).chain(others).take(top).enumerate();
    let top = top.map(|(place, id)| (id, tokenizer.token_bytes(id), likely(place))).collect();
    TokenLogprob { id, bytes: tokenizer.token_bytes(id), logprob: likely(0), top }
}
