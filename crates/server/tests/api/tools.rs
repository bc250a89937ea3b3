//! Tool calls through all APIs.

use serde_json::{Value, json};
use thunder_engine::FinishReason;

use crate::support::{MODEL, Slot, chat, post, scripted_with_tools};

const CHAT: &str = "/v1/chat/completions";

/// A script that writes some text, then calls a tool twice; its pieces cut the marks.
fn calls(slot: Slot) {
    for piece in [
        "I lo",
        "ok.\n<tool_",
        "call>\n{\"name\": \"weather\", \"argu",
        "ments\": {\"city\": \"Ro",
        "m\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}",
        "\n</tool_call>",
    ] {
        slot.delta(piece);
    }
    slot.done(FinishReason::Stop, 30);
}

pub fn tools() -> Value {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    json!([tool("weather"), tool("time")])
}

pub fn anthropic(more: Value) -> Value {
    let schema = json!({"type": "object"});
    let mut body = json!({
        "model": MODEL, "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "weather", "input_schema": schema}, {"name": "time", "input_schema": schema}],
    });
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn openai_gets_calls_apart_from_the_text() {
    let engine = scripted_with_tools(calls);
    let reply = post(&engine, CHAT, chat(json!({"tools": tools()}))).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("I look."), &json!("tool_calls"))
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let functions: Vec<_> = calls.iter().map(|call| call["function"].clone()).collect();
    let expected = [
        json!({"name": "weather", "arguments": "{\"city\": \"Rom\"}"}),
        json!({"name": "time", "arguments": "{}"}),
    ];
    assert_eq!(functions, expected);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(calls.iter().all(|call| call["type"] == "function"));
}

#[tokio::test]
async fn openai_streams_calls_by_their_index() {
    let engine = scripted_with_tools(calls);
    let chunks = post(&engine, CHAT, chat(json!({"tools": tools(), "stream": true}))).await.chunks();
    let (mut text, mut calls) = (String::new(), vec![[String::new(), String::new()]; 2]);
    for chunk in &chunks {
        let delta = &chunk["choices"][0]["delta"];
        text.push_str(delta["content"].as_str().unwrap_or_default());
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let [name, arguments] = &mut calls[call["index"].as_u64().unwrap() as usize];
            name.push_str(call["function"]["name"].as_str().unwrap_or_default());
            arguments.push_str(call["function"]["arguments"].as_str().unwrap());
            assert_eq!(call["id"].is_string(), call["function"]["name"].is_string(), "{call}");
        }
    }
    assert_eq!(text, "I look.");
    assert_eq!(calls, [["weather", "{\"city\": \"Rom\"}"], ["time", "{}"]]);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn one_call_is_enough_if_calls_may_not_be_parallel() {
    let body = chat(json!({"tools": tools(), "parallel_tool_calls": false}));
    let reply = post(&scripted_with_tools(calls), CHAT, body).await.json();
    assert_eq!(reply["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn without_tools_or_with_choice_none_calls_are_text() {
    for more in [json!({}), json!({"tools": tools(), "tool_choice": "none"})] {
        let reply = post(&scripted_with_tools(calls), CHAT, chat(more)).await.json();
        let choice = &reply["choices"][0];
        assert!(choice["message"]["content"].as_str().unwrap().contains("<tool_call>"), "{choice}");
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn the_model_reads_the_tools_and_the_results() {
    let prompt = |slot: Slot| {
        let bytes: Vec<u8> = slot.request.prompt.iter().map(|&id| id as u8).collect();
        slot.delta(&String::from_utf8_lossy(&bytes));
        slot.done(FinishReason::Stop, 1);
    };
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rom\"}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]);
    let body = chat(json!({"messages": messages, "tools": tools(), "tool_choice": "auto"}));
    // The prompt contains an example of a call. If the model writes it, it counts as a call.
    let reply = post(&scripted_with_tools(prompt), CHAT, body).await.json();
    let message = &reply["choices"][0]["message"];
    assert_eq!(
        message["tool_calls"][1]["function"],
        json!({"name": "weather", "arguments": "{\"city\":\"Rom\"}"})
    );
    let text = message["content"].as_str().unwrap();
    assert!(text.contains("\"name\":\"weather\"") && text.contains("sunny\n</tool_response>"), "{text}");
}

#[tokio::test]
async fn a_choice_that_cannot_be_is_refused() {
    let engine = scripted_with_tools(calls);
    for more in [
        json!({"tool_choice": "required"}),
        json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "x"}}}),
    ] {
        let reply = post(&engine, CHAT, chat(more)).await;
        assert_eq!((reply.status.as_u16(), reply.error().2), (400, json!("tool_choice")));
    }
}

#[tokio::test]
async fn anthropic_gets_blocks() {
    let engine = scripted_with_tools(calls);
    let reply = post(&engine, "/v1/messages", anthropic(json!({}))).await.json();
    assert_eq!((&reply["type"], &reply["stop_reason"]), (&json!("message"), &json!("tool_use")));
    let mut content = reply["content"].clone();
    for block in content.as_array_mut().unwrap() {
        block.as_object_mut().unwrap().remove("id");
    }
    let expected = json!([
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Rom"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]);
    assert_eq!(content, expected);
    assert_eq!(reply["usage"]["output_tokens"], 30);
}

#[tokio::test]
async fn anthropic_streams_blocks_one_after_the_other() {
    let engine = scripted_with_tools(calls);
    let reply = post(&engine, "/v1/messages", anthropic(json!({"stream": true}))).await;
    let events: Vec<Value> = reply
        .text
        .trim_end()
        .split("\n\n")
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
            data
        })
        .collect();
    assert_eq!(
        (&events[0]["type"], &events[events.len() - 1]["type"]),
        (&json!("message_start"), &json!("message_stop"))
    );
    let (mut open, mut blocks, mut written) = (None, Vec::new(), String::new());
    for event in &events[1..events.len() - 2] {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, event["index"].as_u64()), (None, Some(blocks.len() as u64)));
                open = event["index"].as_u64();
                blocks.push(event["content_block"]["type"].clone());
                written.push('|');
            }
            "content_block_stop" => {
                assert_eq!(event["index"].as_u64(), open.take());
            }
            _ => {
                assert_eq!(event["index"].as_u64(), open);
                let delta = &event["delta"];
                let text = delta["text"].as_str().or(delta["partial_json"].as_str());
                written.push_str(text.unwrap());
            }
        }
    }
    assert_eq!(blocks, ["text", "tool_use", "tool_use"]);
    assert_eq!(written, "|I look.|{\"city\": \"Rom\"}|{}");
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
}

#[tokio::test]
async fn anthropic_counts_tokens_and_has_its_own_errors() {
    let engine = scripted_with_tools(calls);
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    let reply = post(&engine, "/v1/messages/count_tokens", body.clone()).await;
    // "u:hi|" is five tokens.
    assert_eq!(reply.json(), json!({"input_tokens": 5}));
    let reply = post(&engine, "/v1/messages", body).await;
    assert_eq!(reply.status, 400);
    let message = "the required field `max_tokens` is missing";
    assert_eq!(
        reply.json(),
        json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}})
    );
    let reply = post(&engine, "/v1/messages", anthropic(json!({"mood": 1}))).await;
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("`mood`"));
}

#[tokio::test]
async fn ollama_gets_whole_calls_in_lines() {
    let engine = scripted_with_tools(calls);
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools()});
    let reply = post(&engine, "/api/chat", body.clone()).await;
    assert_eq!(reply.headers["content-type"], "application/x-ndjson");
    let lines: Vec<Value> = reply.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(text, "I look.");
    let calls: Vec<&Value> =
        lines.iter().filter_map(|line| line["message"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(calls[0]["function"], json!({"name": "weather", "arguments": {"city": "Rom"}}));
    assert_eq!(calls.len(), 2);
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("stop"), &json!(30))
    );
    assert!(lines[..lines.len() - 1].iter().all(|line| line["done"] == false));

    let mut whole = body;
    whole["stream"] = json!(false);
    let reply = post(&engine, "/api/chat", whole).await.json();
    assert_eq!(reply["message"]["tool_calls"].as_array().map(Vec::len), Some(2));
    let reply = post(&engine, "/api/chat", json!({"model": MODEL, "mood": 1})).await;
    assert!(reply.json()["error"].as_str().unwrap().contains("mood"), "{}", reply.text);
}

#[tokio::test]
async fn ollama_clients_load_the_model_without_a_prompt() {
    let engine = scripted_with_tools(|slot| slot.fail("nothing was asked"));
    for body in [json!({"model": MODEL}), json!({"model": MODEL, "prompt": "", "keep_alive": -1})] {
        let reply = post(&engine, "/api/generate", body).await.json();
        assert_eq!((&reply["done"], &reply["done_reason"]), (&json!(true), &json!("load")), "{reply}");
        assert_eq!((&reply["model"], &reply["response"]), (&json!(MODEL), &json!("")));
    }
    for body in [json!({"model": MODEL}), json!({"model": MODEL, "messages": []})] {
        let reply = post(&engine, "/api/chat", body).await.json();
        assert_eq!((&reply["done_reason"], &reply["message"]["content"]), (&json!("load"), &json!("")));
    }
    assert_eq!(post(&engine, "/api/generate", json!({"model": "other"})).await.status, 404);
}

/// A call that is cut off inside its arguments.
fn cut_call(slot: Slot) {
    slot.delta("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ro");
    slot.done(FinishReason::Length, 20);
}

#[tokio::test]
async fn a_call_that_was_cut_off_is_never_shown_as_whole() {
    let engine = scripted_with_tools(cut_call);
    let user = json!([{"role": "user", "content": "hi"}]);
    let chat = json!({"model": MODEL, "messages": user, "tools": tools()});
    let reply = post(&engine, CHAT, chat.clone()).await.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let mut ollama = chat;
    for stream in [false, true] {
        ollama["stream"] = stream.into();
        let reply = post(&engine, "/api/chat", ollama.clone()).await.text;
        assert!(reply.contains("\"length\"") && !reply.contains("tool_calls"), "{reply}");
    }
    let reply = post(&engine, "/v1/messages", anthropic(json!({}))).await.json();
    assert_eq!((&reply["stop_reason"], &reply["content"]), (&json!("max_tokens"), &json!([])));
    let tool = json!([{"type": "function", "name": "weather", "parameters": {"type": "object"}}]);
    let body = json!({"model": MODEL, "input": "hi", "tools": tool, "temperature": 0.7});
    let reply = post(&engine, "/v1/responses", body).await.json();
    assert_eq!(
        (&reply["status"], &reply["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
    assert_eq!(reply["temperature"].to_string(), "0.7");
}

#[tokio::test]
async fn ollama_lists_shows_and_generates() {
    let engine = scripted_with_tools(calls);
    let tags = crate::support::get(&engine, "/api/tags").await.json();
    assert_eq!(tags["models"][0]["name"], MODEL);
    assert_eq!(tags["models"][0]["digest"].as_str().map(str::len), Some(64));
    assert_eq!(crate::support::get(&engine, "/api/ps").await.json()["models"][0]["context_length"], 4096);
    assert_eq!(
        crate::support::get(&engine, "/api/version").await.json()["version"],
        env!("CARGO_PKG_VERSION")
    );
    let shown = post(&engine, "/api/show", json!({"model": format!("{MODEL}:latest")})).await.json();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("tools")), "{shown}");
    let body = json!({"model": MODEL, "prompt": "hi", "system": "be brief", "stream": false});
    let reply = post(&engine, "/api/generate", body).await.json();
    assert!(reply["response"].as_str().unwrap().starts_with("I look."), "{reply}");
    // "s:be brief|u:hi|" are the tokens that the script does not count itself.
    assert_eq!(reply["prompt_eval_count"], 16);
}
