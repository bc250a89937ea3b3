//! The turns of a conversation, and the ones that still fit into the context.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::prompt;

/// A question and its answer, which may be incomplete.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    pub question: String,
    pub answer: String,
}

/// A system prompt and the turns so far.
#[derive(Debug, Default)]
pub struct Conversation {
    system: Option<String>,
    turns: Vec<Turn>,
    /// Number of the oldest turns that the model no longer gets.
    left_out: usize,
}

/// The prompt of the next question.
#[derive(Debug, PartialEq)]
pub struct NextPrompt {
    pub tokens: Vec<u32>,
    /// Number of turns that were dropped for this question, in addition to earlier ones.
    pub left_out: usize,
}

/// Why a question cannot be submitted.
#[derive(Debug, PartialEq)]
pub struct TooLong {
    pub tokens: usize,
}

impl Conversation {
    /// A conversation without turns.
    pub fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    /// Removes all turns.
    pub fn clear(&mut self) {
        *self = Self::new(self.system.take());
    }

    /// Adds a turn.
    pub fn push(&mut self, question: String, answer: String) {
        self.turns.push(Turn { question, answer });
    }

    /// Removes the last turn.
    pub fn pop(&mut self) -> Option<Turn> {
        let turn = self.turns.pop();
        self.left_out = self.left_out.min(self.turns.len());
        turn
    }

    /// The prompt of a question, by `encode`. Leaves out the oldest turns until it has at most
    /// `comfortable` tokens; with no turn left, fewer than `context` are enough.
    ///
    /// # Errors
    /// `Ok(Err(_))` if the question alone fills the context; then nothing is left out. An error of
    /// `encode` is passed on.
    pub fn prompt(
        &mut self,
        question: &str,
        (comfortable, context): (usize, usize),
        encode: impl Fn(&[Value]) -> anyhow::Result<Vec<u32>>,
    ) -> anyhow::Result<Result<NextPrompt, TooLong>> {
        for first in self.left_out..=self.turns.len() {
            let tokens = encode(&self.messages(first, Some(question)))?;
            let is_last = first == self.turns.len();
            if tokens.len() <= comfortable || is_last && tokens.len() < context {
                let left_out = first - self.left_out;
                self.left_out = first;
                return Ok(Ok(NextPrompt { tokens, left_out }));
            }
            if is_last {
                return Ok(Err(TooLong { tokens: tokens.len() }));
            }
        }
        unreachable!("the range is not empty")
    }

    /// The system prompt, the turns from `first` on, and a further question.
    fn messages(&self, first: usize, question: Option<&str>) -> Vec<Value> {
        let system = self.system.iter().map(|text| prompt::message("system", text));
        let turns = self.turns[first..].iter().flat_map(|turn| {
            [prompt::message("user", &turn.question), prompt::message("assistant", &turn.answer)]
        });
        system.chain(turns).chain(question.map(|text| prompt::message("user", text))).collect()
    }

    /// All turns as a document: JSON messages if `as_json`, else Markdown.
    pub fn document(&self, model: &str, as_json: bool) -> String {
        if as_json {
            return format!("{:#}\n", json!({ "model": model, "messages": self.messages(0, None) }));
        }
        let mut text = format!("# Conversation with {model}\n");
        if let Some(system) = &self.system {
            let _ = write!(text, "\n## System\n\n{system}\n");
        }
        for Turn { question, answer } in &self.turns {
            let _ = write!(text, "\n## Question\n\n{question}\n\n## Answer\n\n{}\n", answer.trim());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token for each character of the messages.
    fn encode(messages: &[Value]) -> anyhow::Result<Vec<u32>> {
        Ok(messages.iter().flat_map(|m| m["content"].as_str().unwrap_or("").chars()).map(u32::from).collect())
    }

    fn text(next: &NextPrompt) -> String {
        next.tokens.iter().filter_map(|token| char::from_u32(*token)).collect()
    }

    #[test]
    fn the_oldest_turns_are_left_out_and_the_system_prompt_stays() {
        let mut talk = Conversation::new(Some("S".into()));
        for turn in ["1", "2", "3"] {
            talk.push(format!("q{turn}"), format!("a{turn}"));
        }
        let mut ask = |question: &str| talk.prompt(question, (11, 15), encode).expect("encoded");
        let next = ask("q4").expect("it fits");
        assert_eq!((text(&next).as_str(), next.left_out), ("Sq2a2q3a3q4", 1));
        assert_eq!(ask("q4").expect("it fits").left_out, 0, "told once");
        let next = ask("a longer one").expect("it fits");
        assert_eq!((text(&next).as_str(), next.left_out), ("Sa longer one", 2));
        assert!(talk.document("m", true).contains("q1"), "what is left out is still saved");
    }

    #[test]
    fn a_question_that_is_too_long_alone_leaves_nothing_out() {
        let mut talk = Conversation::default();
        talk.push("q1".into(), "a1".into());
        let long = "x".repeat(15);
        let refused = talk.prompt(&long, (11, 15), encode).expect("encoded");
        assert_eq!(refused, Err(TooLong { tokens: 15 }));
        let next = talk.prompt("q2", (11, 15), encode).expect("encoded").expect("it fits");
        assert_eq!((text(&next).as_str(), next.left_out), ("q1a1q2", 0));
    }

    #[test]
    fn documents_have_every_turn() {
        let mut talk = Conversation::new(Some("Be brief.".into()));
        talk.push("What?".into(), "This.\n".into());
        let markdown = talk.document("m", false);
        assert_eq!(
            markdown,
            "# Conversation with m\n\n## System\n\nBe brief.\n\n## Question\n\nWhat?\n\n## Answer\n\nThis.\n"
        );
        let parsed: Value = serde_json::from_str(&talk.document("m", true)).expect("JSON");
        assert_eq!(parsed["messages"][2], json!({ "role": "assistant", "content": "This.\n" }));
    }
}
