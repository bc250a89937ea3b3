//! Answers that end inside a call, through all APIs, whole and streamed.

use serde_json::{Value, json};
use thunder_engine::{Engine, FinishReason};

use crate::support::{MODEL, Reply, Slot, chat, post, scripted_with_tools};
use crate::tools::{anthropic, tools};

const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"}}\n</tool_call>";
/// Bytes of the call before its arguments.
const HEAD: usize = 45;
/// Bytes of the call before its closing mark.
const BODY: usize = 61;

/// An engine that sends this text letter by letter, with this end.
fn says(text: &str, reason: FinishReason) -> Engine {
    let text = text.to_owned();
    scripted_with_tools(move |slot: Slot| {
        text.chars().for_each(|letter| slot.delta(letter.encode_utf8(&mut [0; 4])));
        slot.done(reason, 20);
    })
}

/// A request to each API, whole and streamed, that must call a tool.
fn requests() -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let flat = json!([{"type": "function", "name": "weather", "parameters": {"type": "object"}}]);
    let bodies = [
        ("/v1/chat/completions", chat(json!({"tools": tools(), "tool_choice": "required"}))),
        ("/v1/messages", anthropic(json!({"tool_choice": {"type": "any"}}))),
        ("/v1/responses", json!({"model": MODEL, "input": "hi", "tools": flat, "tool_choice": "required"})),
        ("/api/chat", json!({"model": MODEL, "messages": messages, "tools": tools()})),
    ];
    let both = |(path, body): (&'static str, Value)| {
        [false, true].map(|stream| {
            let mut body = body.clone();
            body["stream"] = stream.into();
            (path, body)
        })
    };
    bodies.into_iter().flat_map(both).collect()
}

/// Parts of the call's marks, as they could appear in an answer's text.
fn shows_a_mark(reply: &Reply) -> bool {
    ["<tool", "tool_call>", "\"name\\\"", "\\\"name", "</to", "<\""]
        .iter()
        .any(|mark| reply.text.contains(mark))
        && !reply.text.contains("arguments\":\"{")
}

#[tokio::test]
async fn an_answer_cut_off_within_a_call_shows_no_mark() {
    for end in [1, 5, 11, 12, 20, 30, HEAD - 1, HEAD + 8, BODY + 3] {
        let engine = says(&CALL[..end], FinishReason::Length);
        for (path, body) in requests() {
            let reply = post(&engine, path, body.clone()).await;
            assert_eq!(reply.status, 200, "{}", reply.text);
            assert!(!shows_a_mark(&reply), "{path} after {end} bytes: {}", reply.text);
            let ends = ["\"length\"", "max_tokens", "max_output_tokens"];
            assert!(ends.iter().any(|end| reply.text.contains(end)), "{path}: {}", reply.text);
        }
    }
}

#[tokio::test]
async fn what_was_complete_of_a_cut_off_call_is_one_with_partial_arguments() {
    for (end, arguments) in
        [(HEAD - 1, None), (HEAD + 8, Some("{\"city\":")), (BODY, Some("{\"city\": \"Rom\"}"))]
    {
        let engine = says(&CALL[..end], FinishReason::Length);
        let body = chat(json!({"tools": tools(), "tool_choice": "required"}));
        let reply = post(&engine, "/v1/chat/completions", body).await.json();
        let choice = &reply["choices"][0];
        let given = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str();
        assert_eq!((given, &choice["finish_reason"]), (arguments, &json!("length")), "{choice}");
    }
}

/// A stop text inside a call ends the answer, but an incomplete call must not be run.
#[tokio::test]
async fn a_stop_text_within_a_call_ends_the_answer_without_a_call_to_run() {
    let body = chat(json!({"tools": tools(), "tool_choice": "required", "stop": ["Rom", "name"]}));
    for (end, number) in [(14, 1), (HEAD + 10, 0)] {
        let engine = says(&CALL[..end], FinishReason::StopText(number));
        let reply = post(&engine, "/v1/chat/completions", body.clone()).await;
        assert!(!shows_a_mark(&reply), "{}", reply.text);
        assert_eq!(reply.json()["choices"][0]["finish_reason"], "stop");
        let body = anthropic(json!({"tool_choice": {"type": "any"}, "stop_sequences": ["Rom", "name"]}));
        let reply = post(&engine, "/v1/messages", body).await.json();
        assert_eq!((&reply["stop_reason"], &reply["content"]), (&json!("stop_sequence"), &json!([])));
    }
}

#[tokio::test]
async fn text_that_is_no_call_is_kept_when_the_answer_is_cut_off() {
    for (text, shown) in
        [("a < b", "a < b"), ("1 <tool> 2", "1 <tool> 2"), ("The <tool_call> tag", "The <tool_call> tag")]
    {
        let engine = says(text, FinishReason::Length);
        let reply = post(&engine, "/v1/chat/completions", chat(json!({"tools": tools()}))).await.json();
        assert_eq!(reply["choices"][0]["message"]["content"], shown);
    }
}

#[tokio::test]
async fn white_space_between_texts_around_a_call_is_kept() {
    let engine = says(&format!("text {CALL} tail"), FinishReason::Stop);
    for stream in [false, true] {
        let body = chat(json!({"tools": tools(), "stream": stream, "logprobs": true}));
        let reply = post(&engine, "/v1/chat/completions", body).await;
        let part = if stream { "delta" } else { "message" };
        let chunks = if stream { reply.chunks() } else { vec![reply.json()] };
        let contents = chunks.iter().filter_map(|chunk| chunk["choices"][0][part]["content"].as_str());
        assert_eq!(contents.collect::<String>(), "text tail");
        let logprobs =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
        let tokens: String = logprobs.flatten().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(tokens, "text tail");
    }
}
