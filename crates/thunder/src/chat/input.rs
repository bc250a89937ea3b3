//! Lines from the terminal: with an editor at the prompt, silent while an answer is written.

use std::borrow::Cow;

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::MemHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};

/// Ends a line that continues in the next line.
const CONTINUES: char = '\\';

/// The line editor. Pasted lines and lines typed before the prompt are kept.
pub struct LineEditor(Editor<Continuation, MemHistory>);

/// What the user typed.
pub enum Typed {
    Line(String),
    Interrupted,
    End,
}

impl LineEditor {
    /// An editor of standard input.
    pub fn new() -> Result<Self, ReadlineError> {
        let mut editor = Editor::with_history(Config::default(), MemHistory::new())?;
        editor.set_helper(Some(Continuation));
        Ok(Self(editor))
    }

    /// The next line, without the marks of continued lines.
    pub fn read(&mut self) -> Result<Typed, ReadlineError> {
        match self.0.readline("> ") {
            Ok(line) => {
                if !line.trim().is_empty() {
                    // If the history cannot be saved, the conversation continues.
                    let _ = self.0.add_history_entry(&line);
                }
                Ok(Typed::Line(joined(&line).into_owned()))
            }
            Err(ReadlineError::Interrupted) => Ok(Typed::Interrupted),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(error),
        }
    }
}

/// Removes the marks only if every line except the last has one, because pasted text may contain
/// such marks.
fn joined(line: &str) -> Cow<'_, str> {
    let breaks = line.matches('\n').count();
    match line.matches("\\\n").count() {
        marked if marked == breaks && marked > 0 => line.replace("\\\n", "\n").into(),
        _ => line.into(),
    }
}

/// A line that ends with `\` continues.
struct Continuation;

impl Validator for Continuation {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match context.input().ends_with(CONTINUES) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Helper for Continuation {}
impl Highlighter for Continuation {}
impl Hinter for Continuation {
    type Hint = String;
}
impl Completer for Continuation {
    type Candidate = String;
}

/// Until this is dropped, the terminal does not show typed text, and keeps it for the next prompt.
/// Ctrl-C still sends a signal.
pub struct Silence(Option<Termios>);

impl Silence {
    /// Does nothing if standard input is not a terminal.
    pub fn new() -> Self {
        let before = tcgetattr(std::io::stdin()).ok();
        if let Some(mode) = &before {
            let mut silent = mode.clone();
            silent.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
            // Fails if the terminal is gone.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &silent);
        }
        Self(before)
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_marks_of_typed_lines_are_removed() {
        assert_eq!(joined("one\\\ntwo\\\nthree"), "one\ntwo\nthree");
        let pasted = "#define A \\\n  1\nint a = A;";
        assert_eq!(joined(pasted), pasted);
        assert_eq!(joined("a\\b"), "a\\b");
    }
}
