//! Answers that continue on another server: the client receives from both what one would have sent.

use axum::body::Body;
use axum::http::Request as HttpRequest;
use serde_json::{Value, json};
use thunder_engine::{AnsweredToken, Engine, Event, FinishReason, TokenLogprob};
use thunder_server::{ServerConfig, router};

use crate::support::{MODEL, Slot, chat, completion, post_request, scripted_with_tools, send};
use crate::tools::{anthropic, tools};

/// Writes some text, then calls two tools. Each piece is one or two tokens; an engine that
/// continues sends all of them again.
fn calls(slot: Slot) {
    let pieces = [
        "I lo",
        "ok.\n<tool_",
        "call>\n{\"name\": \"weather\", \"argu",
        "ments\": {\"city\": \"Ro",
        "m\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}",
        "\n</tool_call>",
    ];
    for (index, piece) in pieces.iter().enumerate() {
        let report = |id: u32| TokenLogprob {
            id,
            bytes: vec![id as u8],
            logprob: -0.1 - id as f32,
            top: vec![(id, vec![id as u8], -1.0 / 3.0)],
        };
        let ids = if index == 1 { vec![70, 71] } else { vec![80 + index as u32] };
        let reported = |id| slot.request.logprobs.is_some().then(|| report(id));
        let tokens: Vec<AnsweredToken> =
            ids.into_iter().map(|id| AnsweredToken { id, report: reported(id) }).collect();
        // Repeated tokens have the reports from the request.
        let begun = slot.request.answered.iter().filter_map(|token| token.report.clone());
        begun.for_each(|given| assert_eq!(given, report(given.id)));
        let logprobs = tokens.iter().filter_map(|token| token.report.clone()).collect();
        slot.send(Event::Delta { text: (*piece).to_owned(), logprobs });
        slot.send(Event::Accepted { tokens });
    }
    slot.done(FinishReason::Stop, 7);
}

async fn relayed(engine: &Engine, path: &str, begun: &Value, body: &Value) -> Vec<Value> {
    relayed_with(engine, path, begun, body, &[]).await
}

async fn relayed_with(
    engine: &Engine,
    path: &str,
    begun: &Value,
    body: &Value,
    headers: &[&'static str],
) -> Vec<Value> {
    let config = ServerConfig { relay: true, ..ServerConfig::default() };
    let mut request: HttpRequest<Body> = post_request(path, format!("{begun}\n{body}"));
    for header in [&["x-thunder-relay"], headers].concat() {
        request.headers_mut().insert(header, "1".parse().unwrap());
    }
    let reply = send(router(engine.clone(), config), request).await;
    assert_eq!(reply.headers["content-type"], "application/x-thunder-relay", "{}", reply.text);
    reply.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The node's state after these lines.
fn begun(lines: &[Value], choices: usize) -> Value {
    let mut begun = vec![json!({"tokens": [], "reports": [], "ended": false}); choices];
    for line in lines {
        let Some(choice) = line["choice"].as_u64() else { continue };
        let choice = &mut begun[choice as usize];
        for field in ["tokens", "reports"] {
            let more = line[field].as_array().cloned().unwrap_or_default();
            choice[field].as_array_mut().unwrap().extend(more);
        }
        if line["ended"] == true {
            choice["ended"] = true.into();
        }
    }
    json!({"state": lines[0]["state"], "choices": begun})
}

/// The client's frames from these lines.
fn text(lines: &[Value]) -> String {
    lines.iter().filter_map(|line| line["frames"].as_str().or_else(|| line["whole"].as_str())).collect()
}

#[tokio::test]
async fn a_client_gets_the_same_whichever_lines_two_servers_send() {
    let ask = json!([{"role": "user", "content": "hi"}]);
    let requests = [
        ("/v1/chat/completions", chat(json!({"tools": tools(), "stream": true})), 1),
        (
            "/v1/chat/completions",
            chat(json!({"tools": tools(), "stream": true, "logprobs": true, "n": 2})),
            2,
        ),
        ("/v1/chat/completions", chat(json!({"tools": tools()})), 1),
        ("/v1/completions", completion(json!({"stream": true, "logprobs": 1})), 1),
        ("/v1/completions", completion(json!({"logprobs": 1})), 1),
        ("/v1/messages", anthropic(json!({"stream": true})), 1),
        ("/v1/responses", json!({"model": MODEL, "input": "hi", "stream": true}), 1),
        ("/api/chat", json!({"model": MODEL, "messages": ask}), 1),
    ];
    for (path, body, choices) in requests {
        let whole = relayed(&scripted_with_tools(calls), path, &Value::Null, &body).await;
        assert!(whole.len() > 7, "{path}: {whole:?}");
        assert!(!text(&whole).is_empty() && whole.last().unwrap()["over"] == true);
        for cut in 1..whole.len() {
            let resume = begun(&whole[..cut], choices);
            let rest = relayed(&scripted_with_tools(calls), path, &resume, &body).await;
            let (got, expected) = (text(&whole[..cut]) + &text(&rest), text(&whole));
            if choices == 1 {
                assert_eq!(got, expected, "{path} after line {cut}");
            } else {
                // Frames of two choices may interleave in another way.
                let sorted = |text: &str| {
                    let mut frames: Vec<String> = text.split("\n\n").map(str::to_owned).collect();
                    frames.sort();
                    frames
                };
                assert_eq!(sorted(&got), sorted(&expected), "{path} after line {cut}");
            }
        }
    }
}

/// The answer's texts in these lines, each with its role.
fn kept(lines: &[Value]) -> Vec<(String, String)> {
    let mut kept: Vec<(String, String)> = Vec::new();
    for part in lines.iter().flat_map(|line| line["kept"].as_array().cloned().unwrap_or_default()) {
        let (role, text) = (part["role"].as_str().unwrap(), part["text"].as_str().unwrap());
        match kept.last_mut().filter(|(last, _)| last == role && part["begins"] != true) {
            Some((_, said)) => said.push_str(text),
            None => kept.push((role.to_owned(), text.to_owned())),
        }
    }
    kept
}

#[tokio::test]
async fn a_node_that_keeps_texts_is_told_each_once_whichever_lines_two_servers_send() {
    let engine = || scripted_with_tools(calls);
    for body in [chat(json!({"tools": tools(), "stream": true})), chat(json!({"tools": tools()}))] {
        let path = "/v1/chat/completions";
        let tell = ["x-thunder-tell-texts"];
        let whole = relayed_with(&engine(), path, &Value::Null, &body, &tell).await;
        assert_eq!(whole[0]["asked"], json!([{"role": "user", "text": "hi"}]));
        let said = kept(&whole);
        let words = |text: &str| text.split_whitespace().collect::<String>();
        let seen: Vec<_> = said.iter().map(|(role, text)| (role.as_str(), words(text))).collect();
        let of_call = |text: &str| ("call", text.to_owned());
        let calls_said = [of_call(r#"weather{"city":"Rom"}"#), of_call("time{}")];
        assert_eq!(seen, [&[("assistant", "Ilook.".to_owned())], &calls_said[..]].concat(), "{whole:?}");
        for cut in 1..whole.len() {
            let begun = begun(&whole[..cut], 1);
            let rest = relayed_with(&engine(), path, &begun, &body, &tell).await;
            assert!(rest.iter().all(|line| line.get("asked").is_none()), "{rest:?}");
            assert_eq!(kept(&[&whole[..cut], &rest].concat()), said, "after line {cut}");
        }
        let untold = relayed(&engine(), path, &Value::Null, &body).await;
        assert!(untold.iter().all(|line| line.get("asked").is_none() && line.get("kept").is_none()));
    }
}

#[tokio::test]
async fn only_a_server_for_nodes_takes_what_has_begun() {
    let engine = scripted_with_tools(calls);
    let mut request = post_request("/v1/completions", format!("null\n{}", completion(json!({}))));
    request.headers_mut().insert("x-thunder-relay", "1".parse().unwrap());
    let refused = send(router(engine.clone(), ServerConfig::default()), request).await;
    assert_eq!(refused.status, 400, "{}", refused.text);
    let config = ServerConfig { relay: true, ..ServerConfig::default() };
    for line in ["", "{", "{}", "[1]", r#"{"state": 1, "choices": []}"#] {
        let mut request = post_request("/v1/completions", format!("{line}\n{}", completion(json!({}))));
        request.headers_mut().insert("x-thunder-relay", "1".parse().unwrap());
        let refused = send(router(engine.clone(), config.clone()), request).await;
        assert_eq!(refused.status, 400, "{line}: {}", refused.text);
        assert!(refused.error().0.contains("malformed"), "{}", refused.text);
    }
}
