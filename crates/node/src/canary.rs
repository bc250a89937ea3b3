//! The canary: a known prompt that a group answers before its model is announced. Its tokens must
//! equal those of a single rank.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The prompt. Any text would do, because only the agreement of two computations counts.
const PROMPT: &str = "The first machine said to the second: count with me. One, two, three,";
/// Tokens of the answer.
const TOKENS: usize = 16;
/// Allowed difference of natural logarithms of probabilities, because other shares round
/// differently. A wrong shard changes them by whole units.
const TOLERANCE: f64 = 0.1;

/// A token of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CanaryToken {
    /// Its text.
    pub text: String,
    /// The logarithm of its probability.
    pub logprob: f64,
    /// The same for the most probable other token.
    pub next: f64,
}

/// An answer, token by token.
pub type CanaryAnswer = Vec<CanaryToken>;

/// A token that represents a number of an encoder's answer, scaled to about 1.
fn of_number(place: usize, number: f64) -> CanaryToken {
    CanaryToken { text: place.to_string(), logprob: number, next: f64::MIN }
}

/// The requests, by path. A model answers the first one of its kind and refuses the ones before.
/// The first is for models that write text, then come those for embedding models and for rerankers.
pub fn questions() -> [(&'static str, String); 3] {
    let text = json!({
        "model": "default", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true,
        "logprobs": 2,
    });
    let vector = json!({"model": "default", "input": PROMPT});
    let scores = json!({"model": "default", "query": PROMPT, "documents": [PROMPT, "Four."]});
    [
        ("/v1/completions", text.to_string()),
        ("/v1/embeddings", vector.to_string()),
        ("/v1/rerank", scores.to_string()),
    ]
}

/// The answer in a response; `None` if the model is of another kind.
///
/// # Errors
/// A message if the response has no answer.
pub fn read(body: &[u8]) -> Result<Option<CanaryAnswer>, String> {
    let strange = || {
        let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
        format!("its canary was answered strangely: {text}")
    };
    let body: Value = serde_json::from_slice(body).map_err(|_| strange())?;
    if body["error"]["code"] == "unsupported_model" {
        return Ok(None);
    }
    let answer = read_vector(&body).or_else(|| read_scores(&body)).or_else(|| read_text(&body));
    answer.map(Some).ok_or_else(strange)
}

fn read_vector(body: &Value) -> Option<CanaryAnswer> {
    let numbers = body["data"][0]["embedding"].as_array()?;
    // The more numbers a vector of length 1 has, the smaller they are.
    let scale = (numbers.len() as f64).sqrt();
    let number = |(place, number): (usize, &Value)| Some(of_number(place, number.as_f64()? * scale));
    numbers.iter().enumerate().map(number).collect()
}

fn read_scores(body: &Value) -> Option<CanaryAnswer> {
    let mut scores: CanaryAnswer = body["results"]
        .as_array()?
        .iter()
        .map(|result| {
            Some(of_number(result["index"].as_u64()? as usize, result["relevance_score"].as_f64()?))
        })
        .collect::<Option<_>>()?;
    scores.sort_by(|a, b| a.text.cmp(&b.text));
    Some(scores)
}

fn read_text(body: &Value) -> Option<CanaryAnswer> {
    let logprobs = &body["choices"][0]["logprobs"];
    let texts = logprobs["tokens"].as_array()?;
    let own = logprobs["token_logprobs"].as_array()?;
    let top = logprobs["top_logprobs"].as_array()?;
    let tokens = texts.iter().zip(own).zip(top).map(|((text, logprob), top)| {
        let (text, logprob) =
            (text.as_str()?.to_owned(), logprob.as_f64().filter(|number| number.is_finite())?);
        let others = top.as_object()?.iter().filter(|(other, _)| **other != text);
        let next = others.filter_map(|(_, logprob)| logprob.as_f64()).fold(f64::MIN, f64::max);
        Some(CanaryToken { text, logprob, next })
    });
    let tokens: Option<CanaryAnswer> = tokens.collect();
    tokens.filter(|tokens| tokens.len() == TOKENS)
}

/// Whether two answers come from correct computations of the same model. Where two tokens are
/// equally probable the answers may differ; the rest is not compared then.
pub fn agree(one: &CanaryAnswer, other: &CanaryAnswer) -> bool {
    for (a, b) in one.iter().zip(other) {
        if (a.logprob - b.logprob).abs() > TOLERANCE {
            return false;
        }
        if a.text != b.text {
            return a.logprob - a.next <= TOLERANCE && b.logprob - b.next <= TOLERANCE;
        }
    }
    !one.is_empty() && one.len() == other.len()
}

/// What is wrong with a group whose answer differs from that of a single rank. `alone` has the name
/// of each rank's node, and its answer alone or why it has none.
pub fn verdict(alone: &[(String, Result<CanaryAnswer, String>)]) -> String {
    let known: Vec<(usize, &str, &CanaryAnswer)> = alone
        .iter()
        .enumerate()
        .filter_map(|(rank, (node, answer))| Some((rank, node.as_str(), answer.as_ref().ok()?)))
        .collect();
    let agreeing = |answer: &CanaryAnswer| known.iter().filter(|(.., other)| agree(answer, other)).count();
    let most = known.iter().map(|(.., answer)| agreeing(answer)).max().unwrap_or(0);
    let (right, wrong): (Vec<_>, Vec<_>) = known.iter().partition(|(.., answer)| agreeing(answer) == most);
    let names = |ranks: &[&(usize, &str, &CanaryAnswer)]| {
        ranks.iter().map(|(rank, node, _)| format!("rank {rank} on {node}")).collect::<Vec<_>>().join(", ")
    };
    let remedy = "compare its files with `thunder model verify`, then look at its memory";
    if 2 * most > known.len() && !wrong.is_empty() {
        let verb = if wrong.len() == 1 { "computes" } else { "compute" };
        return format!(
            "{} {verb} wrongly: alone, the canary's answer is another than that of {}; {remedy}",
            names(&wrong),
            names(&right)
        );
    }
    if most < known.len() {
        return format!(
            "{} answer the canary differently, each alone: one of them has other files or computes wrongly; {remedy}",
            names(&known.iter().collect::<Vec<_>>())
        );
    }
    let silent = alone.iter().enumerate().filter_map(|(rank, (node, answer))| {
        Some(format!("rank {rank} on {node} does not answer it alone: {}", answer.as_ref().err()?))
    });
    let silent: Vec<String> = silent.collect();
    if silent.is_empty() {
        return "the ranks together give another answer to the canary than each alone: try other shares (--split), and \
                report this"
            .to_owned();
    }
    format!("the ranks together do not answer the canary rightly; {}", silent.join("; "))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn answer(texts: &str, shift: f64) -> CanaryAnswer {
        let token = |text: char| CanaryToken { text: text.to_string(), logprob: -1.0 + shift, next: -3.0 };
        texts.chars().map(token).collect()
    }

    #[test]
    fn rounding_and_ties_agree_and_another_answer_does_not() {
        let one = answer("abcd", 0.0);
        assert!(agree(&one, &answer("abcd", 1e-3)) && !agree(&one, &answer("abcd", 0.5)));
        assert!(!agree(&one, &answer("abxd", 0.0)) && !agree(&one, &answer("abc", 0.0)));
        assert!(!agree(&Vec::new(), &Vec::new()));
        // Two tokens are equally probable: either may come, and what follows differs.
        let (mut tie, mut other) = (answer("abcd", 0.0), answer("abxy", 0.0));
        (tie[2].next, other[2].next) = (-1.01, -1.02);
        assert!(agree(&tie, &other));
    }

    #[test]
    fn the_rank_that_differs_from_most_is_named() {
        let alone = |answers: &[Option<&str>]| {
            let names = ["ant", "bee", "cat"];
            let one = |(place, text): (usize, &Option<&str>)| {
                (
                    names[place].to_owned(),
                    text.map(|text| answer(text, 0.0)).ok_or_else(|| "no memory".to_owned()),
                )
            };
            verdict(&answers.iter().enumerate().map(one).collect::<Vec<_>>())
        };
        let named = alone(&[Some("ab"), Some("xy"), Some("ab")]);
        assert!(named.starts_with("rank 1 on bee computes wrongly"), "{named}");
        let two = alone(&[Some("ab"), Some("xy")]);
        assert!(two.contains("rank 0 on ant, rank 1 on bee answer the canary differently"), "{two}");
        let unknown = alone(&[Some("ab"), None, None]);
        assert!(
            unknown.ends_with(
                "bee does not answer it alone: no memory; rank 2 on cat does not answer it alone: no memory"
            ),
            "{unknown}"
        );
        let together = alone(&[Some("ab"), Some("ab"), Some("ab")]);
        assert!(together.contains("another answer to the canary than each alone"), "{together}");
        assert!(alone(&[None, None]).contains("rank 0 on ant does not answer it alone"));
    }

    #[test]
    fn a_response_without_numbers_is_refused_in_words() {
        for body in [
            "",
            "{}",
            r#"{"choices":[{"logprobs":{"tokens":["a"],"token_logprobs":[null],"top_logprobs":[{}]}}]}"#,
        ] {
            assert!(read(body.as_bytes()).unwrap_err().contains("strangely"), "{body}");
        }
        assert!(questions()[0].1.contains("\"temperature\":0"));
    }

    #[test]
    fn encoders_answer_with_numbers() {
        let read = |body: Value| read(body.to_string().as_bytes()).unwrap();
        assert_eq!(read(json!({"error": {"code": "unsupported_model"}})), None);
        let vector = |x: f64| read(json!({"data": [{"embedding": [x, 0.8]}]})).unwrap();
        assert!(agree(&vector(0.6), &vector(0.61)) && !agree(&vector(0.6), &vector(0.8)));
        let score = |index, score: f64| json!({"index": index, "relevance_score": score});
        let scores = |one, other| read(json!({"results": [one, other]})).unwrap();
        let one = scores(score(0, 0.9), score(1, 0.2));
        assert!(agree(&one, &scores(score(1, 0.21), score(0, 0.9))), "in any order");
        assert!(!agree(&one, &scores(score(0, 0.9), score(1, 0.5))));
    }
}
