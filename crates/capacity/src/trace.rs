//! Traces: recorded requests that are replayed in simulated time.

use std::collections::HashMap;

use jiff::Timestamp;
use serde::Deserialize;

use crate::PlanError;
use crate::arrivals::Arrival;

/// Maximum number of requests of a trace. A simulation of this many takes seconds, and a question
/// runs several.
const MOST_REQUESTS: usize = 20_000;
/// Largest time in seconds, since 1970 or from any start: some centuries.
const LATEST_S: f64 = 1e10;
/// Maximum tokens of a prompt or an answer.
const MOST_TOKENS: u64 = 1 << 24;
/// Maximum tokens of all prompts: waiting requests keep theirs in memory, 4 bytes each.
const MOST_PROMPT_TOKENS: u64 = 1 << 28;

/// A line of `thunder usage --requests --format jsonl`, or one written by hand.
#[derive(Deserialize)]
struct Line {
    /// When the request ended, as RFC 3339.
    time: Option<Timestamp>,
    /// Arrival time in seconds from any start, instead of `time`.
    at_s: Option<f64>,
    #[serde(default)]
    duration_s: f64,
    /// Prompts of one key have the same beginning.
    key_id: Option<String>,
    prompt_tokens: u64,
    #[serde(default)]
    cached_tokens: u64,
    completion_tokens: u64,
}

/// Requests in order of arrival; the first at 0 s.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace(Vec<Arrival>);

impl Trace {
    /// Reads JSON lines, in any order. Requests without a prompt or an answer are left out: they
    /// were refused.
    ///
    /// # Errors
    /// Names the line that is wrong.
    pub fn read(text: &str) -> Result<Self, PlanError> {
        let wrong = |line: usize, why: String| PlanError::Trace { line: line + 1, why };
        let mut users = HashMap::<String, u32>::new();
        let mut arrivals = Vec::new();
        let mut prompt_tokens = 0;
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let line: Line = serde_json::from_str(line).map_err(|error| wrong(number, error.to_string()))?;
            let at_s = match (line.at_s, line.time) {
                (Some(at_s), _) => at_s,
                (None, Some(ended)) => ended.as_millisecond() as f64 / 1e3 - line.duration_s,
                (None, None) => return Err(wrong(number, "it has neither `time` nor `at_s`".into())),
            };
            if !(-LATEST_S..=LATEST_S).contains(&at_s) {
                return Err(wrong(number, format!("its time is {at_s} s")));
            }
            if line.prompt_tokens.max(line.completion_tokens) > MOST_TOKENS {
                return Err(wrong(number, format!("more than {MOST_TOKENS} tokens")));
            }
            if line.prompt_tokens == 0 || line.completion_tokens == 0 {
                continue;
            }
            prompt_tokens += line.prompt_tokens;
            if arrivals.len() == MOST_REQUESTS || prompt_tokens > MOST_PROMPT_TOKENS {
                let most = format!("{MOST_REQUESTS} requests and {MOST_PROMPT_TOKENS} tokens of prompts");
                return Err(wrong(number, format!("a trace has at most {most}: take a busy hour")));
            }
            let next = users.len() as u32;
            let user = *users.entry(line.key_id.unwrap_or_default()).or_insert(next);
            arrivals.push(Arrival {
                at_s,
                user,
                prompt: line.prompt_tokens as usize,
                shared: line.cached_tokens.min(line.prompt_tokens) as usize,
                answer: line.completion_tokens as usize,
            });
        }
        arrivals.sort_by(|a: &Arrival, b| a.at_s.total_cmp(&b.at_s));
        let Some(first) = arrivals.first().map(|first| first.at_s) else {
            return Err(wrong(0, "no request has a prompt and an answer".into()));
        };
        arrivals.iter_mut().for_each(|arrival| arrival.at_s -= first);
        Ok(Self(arrivals))
    }

    /// The same requests at `times` the rate.
    pub fn faster(&self, times: f64) -> Vec<Arrival> {
        self.0.iter().map(|arrival| Arrival { at_s: arrival.at_s / times, ..*arrival }).collect()
    }

    /// Requests.
    pub fn requests(&self) -> usize {
        self.0.len()
    }

    /// Seconds from the first request to the last; at least one.
    pub fn span_s(&self) -> f64 {
        self.0.last().map_or(0.0, |last| last.at_s).max(1.0)
    }

    /// Tokens of all prompts, and of all answers.
    pub fn tokens(&self) -> [f64; 2] {
        let sum = |of: fn(&Arrival) -> usize| self.0.iter().map(of).sum::<usize>() as f64;
        [sum(|arrival| arrival.prompt), sum(|arrival| arrival.answer)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_report_is_a_trace() {
        let text = r#"
{"number":2,"time":"2026-11-25T10:00:20Z","key_id":"k2","outcome":"complete","prompt_tokens":100,"cached_tokens":64,"completion_tokens":10,"duration_s":2.5}
{"number":1,"time":"2026-11-25T10:00:08Z","key_id":"k1","outcome":"complete","prompt_tokens":50,"cached_tokens":0,"completion_tokens":5,"duration_s":0.5}
{"number":3,"time":"2026-11-25T10:00:21Z","key_id":null,"outcome":"refused","prompt_tokens":0,"completion_tokens":0}
"#;
        let trace = Trace::read(text).expect("a trace");
        assert_eq!((trace.requests(), trace.span_s(), trace.tokens()), (2, 10.0, [150.0, 15.0]));
        let fast = trace.faster(2.0);
        assert_eq!(fast[1], Arrival { at_s: 5.0, user: 0, prompt: 100, shared: 64, answer: 10 });
        assert_eq!((fast[0].at_s, fast[0].user), (0.0, 1));
    }

    #[test]
    fn lines_that_are_wrong_are_named() {
        for (text, says) in [
            ("", "line 1: no request"),
            ("{\"at_s\":0,\"prompt_tokens\":1,\"completion_tokens\":1}\nx", "line 2: "),
            ("{\"prompt_tokens\":1,\"completion_tokens\":1}", "neither"),
            ("{\"at_s\":1,\"prompt_tokens\":999999999999,\"completion_tokens\":1}", "tokens"),
            ("{\"at_s\":1,\"prompt_tokens\":-1,\"completion_tokens\":1}", "line 1: "),
            ("{\"at_s\":1e308,\"prompt_tokens\":1,\"completion_tokens\":1}", "time"),
            ("{\"time\":\"yesterday\",\"prompt_tokens\":1,\"completion_tokens\":1}", "line 1: "),
        ] {
            let error = Trace::read(text).expect_err(text).to_string();
            assert!(error.contains(says), "{error}");
        }
        let long = format!("{{\"at_s\":0,\"prompt_tokens\":{MOST_TOKENS},\"completion_tokens\":1}}\n");
        let error = Trace::read(&long.repeat(17)).expect_err("too long").to_string();
        assert!(error.contains("line 17: a trace has at most"), "{error}");
    }
}
