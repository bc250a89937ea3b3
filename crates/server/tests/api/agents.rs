//! What coding agents send in addition to functions: custom tools, tools that OpenAI's servers run,
//! and pictures in results.

use serde_json::{Value, json};
use thunder_engine::FinishReason;
use thunder_server::{ServerConfig, router};

use crate::support::{Slot, post, post_request, scripted_with_tools, send};

const PATCH: &str = "*** Begin Patch\n\"x\"\n";

/// Calls the tool `apply_patch` with a text.
fn patches(slot: Slot) {
    let call = json!({"name": "apply_patch", "arguments": {"input": PATCH}}).to_string();
    let text = format!("<tool_call>\n{call}\n</tool_call>");
    let (first, second) = text.split_at(text.len() / 2);
    slot.delta(first);
    slot.delta(second);
    slot.done(FinishReason::Stop, 9);
}

/// Says what it was asked.
fn prompt(slot: Slot) {
    let prompt: Vec<u8> = slot.request.prompt.iter().map(|&id| id as u8).collect();
    slot.delta(&String::from_utf8_lossy(&prompt));
    slot.done(FinishReason::Stop, 1);
}

fn codex(more: Value) -> Value {
    let format = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"*** Begin Patch\""});
    let mut body = json!({"model": "default", "input": "patch it", "tools": [
        {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": format},
        {"type": "web_search", "external_web_access": false},
    ]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn a_custom_tools_call_has_a_text() {
    let engine = scripted_with_tools(patches);
    let whole = post(&engine, "/v1/responses", codex(json!({}))).await.json();
    let call = &whole["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("custom_tool_call"), &json!("apply_patch")));
    assert_eq!((&call["input"], &call["status"]), (&json!(PATCH), &json!("completed")));
    let tools = whole["tools"].as_array().unwrap();
    assert_eq!((tools.len(), &tools[0]["name"]), (1, &json!("apply_patch")), "the rest was left out");
    let stream = post(&engine, "/v1/responses", codex(json!({"stream": true}))).await.text;
    let events: Vec<Value> = stream
        .trim_end()
        .split("\n\n")
        .map(|event| serde_json::from_str(event.split_once("data: ").unwrap().1).unwrap())
        .collect();
    let one =
        |kind: &str| events.iter().find(|event| event["type"] == kind).unwrap_or_else(|| panic!("{kind}"));
    assert_eq!(one("response.custom_tool_call_input.delta")["delta"], PATCH);
    assert_eq!(one("response.custom_tool_call_input.done")["input"], PATCH);
    let done = &one("response.output_item.done")["item"];
    assert_eq!((&done["type"], &done["input"]), (&call["type"], &call["input"]));
    assert_eq!(one("response.output_item.added")["item"]["id"], done["id"]);
}

#[tokio::test]
async fn a_custom_tools_call_and_its_result_go_back() {
    let items = json!([
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "patch it"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": PATCH, "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done!"},
    ]);
    let reply = post(&scripted_with_tools(prompt), "/v1/responses", codex(json!({"input": items}))).await;
    let text = reply.json()["output"][0]["content"][0]["text"].as_str().unwrap_or_default().to_owned();
    assert!(text.contains("Done!") && text.contains("start: "), "{}", reply.text);
}

#[tokio::test]
async fn a_custom_tools_regex_is_a_grammar() {
    let format = json!({"type": "grammar", "syntax": "regex", "definition": "[a-c]+"});
    let tools = json!([{"type": "custom", "name": "f", "format": format}]);
    let is_constrained = |slot: Slot| {
        slot.delta(if slot.request.constraint.is_some() { "yes" } else { "no" });
        slot.done(FinishReason::Stop, 1);
    };
    let body = codex(json!({"tools": tools}));
    let reply = post(&scripted_with_tools(is_constrained), "/v1/responses", body).await;
    assert_eq!(reply.json()["output"][0]["content"][0]["text"], "yes", "{}", reply.text);
}

#[tokio::test]
async fn a_picture_among_results_is_told_to_the_model() {
    let image =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}});
    let ask = |content: Value| {
        json!({"model": "default", "max_tokens": 9, "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": content},
        ]})
    };
    let engine = scripted_with_tools(prompt);
    let result = json!([{"type": "tool_result", "tool_use_id": "1", "content": [image]}]);
    let reply = post(&engine, "/v1/messages", ask(result)).await;
    assert!(reply.text.contains("an image was left out"), "{}", reply.text);
    // Pictures from the user are refused: an answer without them would be about something else.
    let reply = post(&engine, "/v1/messages", ask(json!([image]))).await;
    assert_eq!(reply.status, 400);
}

#[tokio::test]
async fn an_alias_is_the_model() {
    let body =
        json!({"model": "claude-haiku-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]});
    for (aliases, status) in [(vec![], 404), (vec!["claude-haiku-4-5"], 200), (vec!["*"], 200)] {
        let aliases = aliases.into_iter().map(str::to_owned).collect();
        let config = ServerConfig { aliases, ..ServerConfig::default() };
        let service = router(scripted_with_tools(prompt), config);
        let reply = send(service, post_request("/v1/messages", body.to_string())).await;
        assert_eq!(reply.status, status, "{}", reply.text);
    }
}

#[tokio::test]
async fn hints_of_anthropics_tools_are_taken() {
    let tool = json!({
        "name": "f", "input_schema": {"type": "object"}, "description": "Sees", "defer_loading": true,
        "allowed_callers": ["direct"], "input_examples": [{"city": "Rom"}],
    });
    let body = |tool: Value| json!({"model": "default", "max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": "x"}]});
    let engine = scripted_with_tools(prompt);
    let reply = post(&engine, "/v1/messages", body(tool.clone())).await;
    assert!(reply.text.contains("Example of its input") && reply.text.contains("Rom"), "{}", reply.text);
    let mut other = tool;
    other["allowed_callers"] = json!(["code_execution_20250825"]);
    assert_eq!(post(&engine, "/v1/messages", body(other)).await.status, 400);
}
