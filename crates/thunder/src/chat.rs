//! `thunder chat`.

mod commands;
mod conversation;
mod input;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use clap::Args;
use thunder_engine::{Engine, FinishReason};

use self::commands::{HELP, Line};
use self::conversation::{Conversation, TooLong, Turn};
use self::input::{LineEditor, Silence, Typed};
use crate::engine_args::EngineArgs;
use crate::model_arg::ModelArg;
use crate::prompt::{self, Answer, Reading, SamplingArgs};
use crate::wrap::{self, Wrapper};
use crate::{interrupt, session};

/// Chat with a model in the terminal
///
/// Ctrl-C stops an answer, Ctrl-D ends the conversation, and /help lists the commands. If the
/// conversation becomes longer than the context, its oldest questions are dropped.
#[derive(Args)]
pub struct ChatCommand {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// An answer gets at least this share of the context, if older turns can be dropped.
const ANSWER_SHARE: usize = 4;

impl ChatCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let Some(session) = session::open(self.model.name(), &self.engine)? else { return Ok(()) };
        let session = session.that_writes_text()?;
        let conversation = Conversation::new(self.sampling.system.clone());
        let chat = Chat { engine: &session.head.engine, sampling: self.sampling, conversation };
        let talked = chat.talk();
        let closed = session.close();
        // If both failed, the end of the ranks is the reason.
        closed.and(talked)
    }
}

/// A conversation with an engine.
struct Chat<'a> {
    engine: &'a Engine,
    sampling: SamplingArgs,
    conversation: Conversation,
}

impl Chat<'_> {
    fn talk(mut self) -> anyhow::Result<()> {
        let unreadable = || "cannot read from the terminal";
        let mut editor = LineEditor::new().with_context(unreadable)?;
        let info = self.engine.info();
        eprintln!(
            "{} on {} rank(s), context of {} tokens. /help lists commands, Ctrl-D ends.",
            info.name, info.ranks, info.context_length
        );
        let mut is_leaving = false;
        loop {
            match editor.read().with_context(unreadable)? {
                Typed::Line(line) => {
                    is_leaving = false;
                    if self.obey(&line)? == Go::Leave {
                        return Ok(());
                    }
                }
                // The first Ctrl-C may have been meant for an answer that had just ended.
                Typed::Interrupted if !is_leaving => {
                    println!("Press Ctrl-C again, or Ctrl-D, to end.");
                    is_leaving = true;
                }
                Typed::Interrupted | Typed::End => return Ok(()),
            }
        }
    }

    fn obey(&mut self, line: &str) -> anyhow::Result<Go> {
        match commands::parse(line) {
            Line::Nothing => {}
            Line::Question(question) => {
                self.ask(question)?;
            }
            Line::Regenerate => match self.conversation.pop() {
                Some(Turn { question, answer }) => {
                    if !self.ask(&question)? {
                        self.conversation.push(question, answer);
                    }
                }
                None => println!("there is no question yet"),
            },
            Line::Undo => match self.conversation.pop() {
                Some(Turn { question, .. }) => println!("removed: {}", first_line(&question)),
                None => println!("there is no question yet"),
            },
            Line::Clear => self.conversation.clear(),
            Line::System(text) => {
                self.conversation = Conversation::new(Some(text.to_owned()).filter(|text| !text.is_empty()));
            }
            Line::Set(change) => {
                let changed = change.map(|(name, value)| self.sampling.set(name, value, self.engine));
                match changed {
                    Some(Err(error)) => println!("{error:#}"),
                    _ => println!("{}", self.sampling.shown(&self.engine.info().default_sampling)),
                }
            }
            Line::Save(file) => match self.save(Path::new(file)) {
                Ok(()) => println!("saved to {file}"),
                Err(error) => println!("{}", crate::report::line(&error)),
            },
            Line::Help => println!("{HELP}"),
            Line::Quit => return Ok(Go::Leave),
            Line::Wrong(told) => println!("{told}"),
        }
        Ok(Go::On)
    }

    /// Answers a question and adds both to the conversation; false if the question could not be
    /// submitted.
    fn ask(&mut self, question: &str) -> anyhow::Result<bool> {
        let engine = self.engine;
        let context = engine.info().context_length;
        let room = self.sampling.max_tokens().unwrap_or(usize::MAX).min(context / ANSWER_SHARE);
        let encode = |messages: &[_]| prompt::tokens(engine, messages);
        let next = match self.conversation.prompt(question, (context - room, context), encode) {
            Ok(Ok(next)) => next,
            Ok(Err(TooLong { tokens })) => {
                println!("this question has {tokens} tokens, but the context holds {context}: shorten it");
                return Ok(false);
            }
            // A chat template may reject a conversation.
            Err(error) => {
                println!("{}; /clear starts over", crate::report::line(&error));
                return Ok(false);
            }
        };
        match next.left_out {
            0 => {}
            1 => println!("(the context is full: the oldest question and its answer are left out)"),
            more => println!("(the context is full: the {more} oldest questions and answers are left out)"),
        }
        let request = self.sampling.request(next.tokens, &engine.info().default_sampling);
        let reading = Reading::new(engine, &request);
        let stream = match engine.submit(request) {
            Ok(stream) => stream,
            Err(error) if engine.stopped().is_none() => {
                println!("{error}; /clear starts over");
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        let answer = shown(reading, stream)?;
        println!("{}", self.remark(&answer));
        self.conversation.push(question.to_owned(), answer.text);
        Ok(true)
    }

    /// The message after an incomplete answer.
    fn remark(&self, answer: &Answer) -> String {
        match answer.reason {
            Some(FinishReason::Stop | FinishReason::StopText(_)) => String::new(),
            None => " (stopped)".to_owned(),
            Some(FinishReason::Length) => match self.sampling.max_tokens() {
                Some(most) if answer.usage.completion_tokens >= most => {
                    format!(" (cut off after max_tokens {most}: see /set)")
                }
                _ => " (cut off: the context is full)".to_owned(),
            },
        }
    }

    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let as_json = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json"));
        let text = self.conversation.document(&self.engine.info().name, as_json);
        let failed = || format!("cannot write {}", path.display());
        let mut file = File::create_new(path).with_context(failed)?;
        file.write_all(text.as_bytes()).with_context(failed)
    }
}

/// Whether the conversation continues.
#[derive(PartialEq)]
enum Go {
    On,
    Leave,
}

/// Writes an answer to the terminal while it is generated; Ctrl-C stops it.
fn shown(reading: Reading<'_>, stream: thunder_engine::EventStream) -> anyhow::Result<Answer> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let stop = is_stopped.clone();
    let _asked = interrupt::on_next(move |signal| {
        stop.store(true, Ordering::Relaxed);
        signal == signal_hook::consts::SIGINT
    });
    let _silence = Silence::new();
    let mut wrapper = Wrapper::default();
    let show = |text: &str| prompt::print_now(&wrapper.push(text, wrap::terminal_width()));
    reading.answer(stream, || is_stopped.load(Ordering::Relaxed), show)
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
