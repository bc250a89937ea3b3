//! Faults while a node fetches what its rank reads of a model, and what follows from them.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Fault, Question, Series};
use crate::weights::{json_of, put_model};
use crate::{NAMES, Node, PROGRAM, wait};

/// A model that the first node has and the others lack.
const FETCHED: &str = "org/fetched";
/// Place of its question among the series' questions.
pub const QUESTION: usize = 2;

/// Makes the model on the first node.
pub fn prepare(nodes: &[Node; 3]) -> Question {
    let make = format!("{PROGRAM} model synth --arch qwen3-0.6b --layers 6 /root/fetched");
    nodes[0].machine.run(&make).unwrap();
    put_model(&nodes[0], FETCHED, "/root/fetched");
    nodes[0].machine.run("rm -r /root/fetched").unwrap();
    let body = json!({
        "model": FETCHED, "prompt": "The sea", "max_tokens": 40, "ignore_eos": true, "temperature": 0, "stream": true,
    });
    Question { body, answer: String::new() }
}

impl Series {
    /// The nodes on which the fetched model is ready.
    fn fetched_on(&self, asked: usize) -> Option<usize> {
        let status = self.nodes[asked].status()?;
        let model = status["models"].as_array()?.iter().find(|model| model["name"] == FETCHED)?.clone();
        (model["ready"] == true).then(|| model["ranks"].as_array().map_or(0, Vec::len))
    }

    /// Has the first node and another run the model; the other has nothing of it.
    fn load_fetched(&mut self, asked: usize, other: usize) {
        let split = format!("{}=1,{}=1", NAMES[0], NAMES[other]);
        let words = [
            "load",
            FETCHED,
            "--split",
            &split,
            "--on-loss",
            "wait",
            "--wait",
            "0",
            "--",
            "--context",
            "256",
        ];
        let loaded = self.nodes[asked].model(&words);
        assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
    }

    /// Waits for the model, asks it, compares what came with its hashes, and deletes that again.
    fn use_and_remove_fetched(&mut self, asked: usize, other: usize) {
        wait("the fetched model", || self.fetched_on(asked) == Some(2));
        let (answer, _) = self.ask(asked, QUESTION, |_| {});
        let expected = &mut self.questions[QUESTION].answer;
        if expected.is_empty() {
            assert!(!answer.is_empty());
            expected.clone_from(&answer);
        }
        assert_eq!(answer, *expected, "the text without a fault");
        let node = NAMES[other];
        let verified = json_of(self.nodes[asked].model(&["verify", FETCHED, "--nodes", node, "--json"]));
        let state = &verified["nodes"][0]["state"]["done"];
        assert!(state.as_str().is_some_and(|state| state.contains("part: ")), "{verified}");
        assert!(self.nodes[asked].model(&["unload", FETCHED]).status.success());
        let removed = || self.nodes[asked].model(&["remove", FETCHED, "--nodes", node, "--json"]);
        wait("its ranks have ended", || removed().status.success());
        let list: Value = json_of(self.nodes[asked].model(&["list", "--nodes", node, "--json"]));
        assert_eq!(list["nodes"][node].as_array().map(Vec::len), Some(0), "{list}");
    }

    /// Loads the model and uses it without a fault.
    pub fn learn_fetched(&mut self) {
        self.load_fetched(2, 1);
        self.use_and_remove_fetched(2, 1);
        self.mend();
    }

    /// One fault while another node fetches its part of the model, and an answer is written.
    pub fn fetch_round(&mut self, fault: Fault) -> Duration {
        let other = 1 + self.below(2);
        let asked = 3 - other;
        // One of three faults hits the sender.
        let victim = if self.below(3) < 2 { other } else { 0 };
        self.load_fetched(asked, other);
        std::thread::sleep(Duration::from_millis(self.below(700) as u64));
        let (answer, took) = self.ask(asked, 0, |series| series.strike(fault, victim));
        assert_eq!(answer, self.questions[0].answer, "{fault:?} during a fetch: the text without a fault");
        self.repair(fault, victim);
        self.use_and_remove_fetched(asked, other);
        self.mend();
        took
    }
}
