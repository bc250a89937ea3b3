//! `thunder chat`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use clap::Args;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::Value;
use thunder_engine::Engine;

use crate::engine_args::EngineArgs;
use crate::prompt::{self, SamplingArgs};
use crate::session;

/// Talk with a model in the terminal
///
/// Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists the commands.
#[derive(Args)]
pub struct ChatCommand {
    /// `builtin`, a folder, or the name of a model in the Hugging Face cache
    #[arg(default_value = crate::builtin::NAME)]
    model: String,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

const HELP: &str = "/system TEXT  set the system prompt and start over\n/clear        start over\n/undo         remove \
                    the last question and its answer\n/quit         end (so does Ctrl-D)";

impl ChatCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let Some(session) = session::open(&self.model, &self.engine)? else { return Ok(()) };
        let talked = self.talk(&session.head.engine);
        let closed = session.close();
        talked.and(closed)
    }

    fn talk(&self, engine: &Engine) -> anyhow::Result<()> {
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = interrupted.clone();
        ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed)).context("cannot catch Ctrl-C")?;
        let mut editor = DefaultEditor::new().context("cannot read from the terminal")?;
        let mut system = self.sampling.system.clone();
        let mut messages = new_conversation(system.as_deref());
        eprintln!(
            "{} on {} rank(s). /help lists commands, Ctrl-D ends.",
            engine.info().name,
            engine.info().ranks
        );
        let mut leaving = false;
        loop {
            let line = match editor.readline("> ") {
                Ok(line) => line,
                // The first Ctrl-C may have been meant for an answer that had just ended.
                Err(ReadlineError::Interrupted) if !leaving => {
                    println!("Press Ctrl-C again, or Ctrl-D, to end.");
                    leaving = true;
                    continue;
                }
                Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error).context("cannot read from the terminal"),
            };
            leaving = false;
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            // A failure to keep the history does not end the conversation.
            let _ = editor.add_history_entry(line);
            match line.split_once(' ').unwrap_or((line, "")) {
                ("/quit" | "/exit", _) => return Ok(()),
                ("/help", _) => println!("{HELP}"),
                ("/clear", _) => messages = new_conversation(system.as_deref()),
                ("/undo", _) => {
                    let asked = messages.iter().rposition(|message| message["role"] == "user");
                    messages.truncate(asked.unwrap_or(messages.len()));
                }
                ("/system", text) => {
                    system = Some(text.trim().to_owned()).filter(|text| !text.is_empty());
                    messages = new_conversation(system.as_deref());
                }
                (command, _) if command.starts_with('/') => println!("unknown command {command}\n{HELP}"),
                _ => self.answer(engine, &mut messages, line, &interrupted)?,
            }
        }
    }

    fn answer(
        &self,
        engine: &Engine,
        messages: &mut Vec<Value>,
        question: &str,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<()> {
        messages.push(prompt::message("user", question));
        let tokens = match prompt::tokens(engine, messages) {
            Ok(tokens) => tokens,
            // A chat template may reject a conversation.
            Err(error) => {
                messages.pop();
                println!("{error:#}; /clear starts over");
                return Ok(());
            }
        };
        let request = self.sampling.request(tokens, &engine.info().default_sampling);
        interrupted.store(false, Ordering::Relaxed);
        let stream = match engine.submit(request) {
            Ok(stream) => stream,
            Err(error) if engine.stopped().is_none() => {
                messages.pop();
                println!("{error}; /clear starts over");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let answer = prompt::read(stream, interrupted, prompt::print_now)?;
        println!("{}", if answer.reason.is_none() { " (stopped)" } else { "" });
        messages.push(prompt::message("assistant", &answer.text));
        Ok(())
    }
}

fn new_conversation(system: Option<&str>) -> Vec<Value> {
    system.iter().map(|text| prompt::message("system", text)).collect()
}
