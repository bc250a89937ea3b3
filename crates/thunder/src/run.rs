//! `thunder run`.

use std::ffi::OsString;
use std::io::{IsTerminal, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::json;
use thunder_engine::FinishReason;

use crate::engine_args::EngineArgs;
use crate::model_arg::completer;
use crate::prompt::{self, Reading, SamplingArgs};
use crate::wrap::{self, Wrapper};
use crate::{interrupt, mlx_launch, session};

/// Answer one prompt
///
/// Without PROMPT, the prompt is read from standard input: `git diff | thunder run MODEL --system
/// "Review this change."`
#[derive(Args)]
pub struct RunCommand {
    /// `builtin`, a folder, a GGUF file, or the name of a model in the Hugging Face cache
    #[arg(add = completer())]
    model: OsString,
    /// The prompt [default: standard input]
    prompt: Option<String>,
    /// Continue the prompt as plain text, without the model's chat template
    ///
    /// Special tokens in the prompt are then special, as in /v1/completions, so you can write the
    /// turns of a conversation yourself.
    #[arg(long)]
    raw: bool,
    /// Print one JSON object with text, token counts and speed
    #[arg(long)]
    json: bool,
    /// Print token counts and speed to standard error afterwards
    #[arg(long)]
    stats: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

impl RunCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let is_head = session::is_head()?;
        let question = match &self.prompt {
            Some(prompt) => prompt.clone(),
            None if !is_head => String::new(),
            None if std::io::stdin().is_terminal() => {
                bail!(
                    "no prompt: try thunder run {} \"What is a rank?\", or thunder chat",
                    self.model.display()
                )
            }
            None => {
                let mut text = String::new();
                std::io::stdin()
                    .read_to_string(&mut text)
                    .context("cannot read the prompt from standard input")?;
                text
            }
        };
        if is_head && question.trim().is_empty() {
            bail!("the prompt is empty: try thunder run {} \"What is a rank?\"", self.model.display());
        }
        if self.prompt.is_some() {
            mlx_launch::fill_input();
        }
        let Some(session) = session::open(&self.model, &self.engine)? else { return Ok(()) };
        let session = session.that_writes_text()?;
        let signal = Arc::new(AtomicI32::new(0));
        let first = {
            let signal = signal.clone();
            interrupt::on_next(move |number| {
                eprintln!("\nending; Ctrl-C again ends at once");
                signal.store(number, Ordering::Relaxed);
                true
            })
        };
        let answer = self.answer(&session, &question, &signal);
        let closed = session.close();
        drop(first);
        match signal.load(Ordering::Relaxed) {
            // If both failed, the end of the ranks is the reason.
            0 => closed.and(answer),
            signal => interrupt::end(signal),
        }
    }

    fn answer(&self, session: &session::Session, question: &str, signal: &AtomicI32) -> anyhow::Result<()> {
        let engine = &session.head.engine;
        let tokens = if self.raw {
            engine.info().text_prompt(question)?
        } else {
            let system = self.sampling.system.iter().map(|text| prompt::message("system", text));
            let messages: Vec<_> = system.chain([prompt::message("user", question)]).collect();
            prompt::tokens(engine, &messages)?
        };
        let request = self.sampling.request(tokens, &engine.info().default_sampling);
        let is_stopped = || signal.load(Ordering::Relaxed) != 0;
        let mut wrapper = Wrapper::default();
        let show = |text: &str| match self.json {
            true => Ok(()),
            false => prompt::print_now(&wrapper.push(text, wrap::terminal_width())),
        };
        let reading = Reading::new(engine, &request);
        let answer = reading.answer(engine.submit(request)?, is_stopped, show)?;
        let (usage, rate) = (&answer.usage, prompt::decode_rate(&answer.usage));
        if self.json {
            let ended = matches!(answer.reason, Some(FinishReason::Stop | FinishReason::StopText(_)));
            let reason = if ended { "stop" } else { "length" };
            let object = json!({
                "text": answer.text,
                "finish_reason": reason,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "time_to_first_token_s": usage.time_to_first_token.as_secs_f64(),
                "tokens_per_s": rate,
                "ranks": engine.info().ranks,
                "device": session.head.device,
                "transport": session.head.transport,
            });
            println!("{object}");
            return Ok(());
        }
        println!();
        let is_cut = answer.reason == Some(FinishReason::Length) && self.sampling.max_tokens().is_none();
        if is_cut {
            eprintln!(
                "the answer is cut off: the context of {} tokens is full",
                engine.info().context_length
            );
        }
        if self.stats {
            eprintln!(
                "{} prompt tokens, first token after {:.0} ms, {} tokens at {rate:.1} tokens/s on {} rank(s)",
                usage.prompt_tokens,
                usage.time_to_first_token.as_secs_f64() * 1e3,
                usage.completion_tokens,
                engine.info().ranks,
            );
        }
        Ok(())
    }
}
