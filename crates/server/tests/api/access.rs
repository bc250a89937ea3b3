//! Keys, limits, usage and administration over HTTP.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request as HttpRequest;
use serde_json::{Value, json};
use thunder_access::{
    Access, Actor, Filter, Gate, Limits, NewKey, Now, Outcome, Retention, Role, Time, UsageRecord,
};
use thunder_dashboard::{Act, Answer, Ask, Extension};
use thunder_engine::{Engine, FinishReason};
use thunder_server::{ServerConfig, router};
use tower::ServiceExt;

use crate::lifecycle::{endless, expect_disconnects};
use crate::support::{
    Held, MODEL, Reply, Slot, anything, chat, completion, hello, post_request, scripted, scripted_with_tools,
    send, until,
};

const CHAT: &str = "/v1/chat/completions";

/// A server with a store.
struct Server {
    router: Router,
    access: Access,
    _folder: tempfile::TempDir,
}

fn server(engine: Engine, at_once: Option<usize>) -> Server {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), at_once).unwrap();
    let config = ServerConfig {
        access: Some(access.clone()),
        api_keys: vec!["fixed".into()],
        ..ServerConfig::default()
    };
    Server { router: router(engine, config), access, _folder: folder }
}

impl Server {
    fn key(&self, new: Value) -> String {
        let new: NewKey = serde_json::from_value(new).unwrap();
        self.access.create_key(new, &Actor::local(), Now::read().time).unwrap().1
    }

    async fn ask(&self, method: &str, path: &str, key: Option<&str>, body: Option<&Value>) -> Reply {
        let mut request = HttpRequest::builder().method(method).uri(path);
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = match body {
            Some(body) => request.header("content-type", "application/json").body(body.to_string().into()),
            None => request.body(Body::empty()),
        };
        send(self.router.clone(), request.unwrap()).await
    }

    fn records(&self) -> Vec<UsageRecord> {
        self.access.records(&Filter::default(), None, 1000).unwrap()
    }
}

/// Every method of every path of the document, with its example and the roles that may use it.
async fn routes(server: &Server) -> Vec<(String, String, Option<Value>, &'static str)> {
    let document = server.ask("GET", "/openapi.json", None, None).await.json();
    let mut routes = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        // The program around a server answers these; `crates/thunder/tests/operating` asks a node.
        if path == "/admin/models/plan" {
            continue;
        }
        for (method, operation) in methods.as_object().unwrap() {
            let path = path.replace("{name}", "victim").replace("{id}", "some");
            let body = operation
                .get("requestBody")
                .map(|body| body["content"]["application/json"]["example"].clone());
            let open = ["/health", "/health/live", "/health/ready", "/openapi.json"];
            let who = match operation["x-role"].as_str() {
                Some("admin") => "admin",
                _ if open.contains(&path.as_str()) || operation["x-open"] == true => "all",
                _ => "key",
            };
            routes.push((method.to_uppercase(), path, body, who));
        }
    }
    routes
}

#[tokio::test]
async fn every_route_asks_for_the_right_key() {
    let server = server(scripted_with_tools(anything), None);
    let long_ago =
        NewKey { name: "old".into(), role: Role::Admin, expires: Some(Time(2000)), ..NewKey::default() };
    let (_, expired) = server.access.create_key(long_ago, &Actor::local(), Time(1000)).unwrap();
    let revoked = server.key(json!({"name": "gone", "role": "admin"}));
    server.access.revoke_key("gone", &Actor::local(), Now::read().time).unwrap();
    let user = server.key(json!({"name": "user", "team": "a"}));
    let other = server.key(json!({"name": "other", "team": "b"}));
    let admin = server.key(json!({"name": "admin", "role": "admin"}));
    server.key(json!({"name": "victim"}));
    let guess = format!("{}x", &admin[..admin.len() - 1]);
    let routes = routes(&server).await;
    assert!(routes.len() > 30 && routes.iter().filter(|route| route.3 == "admin").count() >= 11);
    for (method, path, body, who) in &routes {
        let ask = async |key: Option<&str>| {
            let reply = server.ask(method, path, key, body.as_ref()).await;
            let code =
                serde_json::from_str::<Value>(&reply.text).unwrap_or_default()["error"]["code"].clone();
            (reply.status.as_u16(), code)
        };
        for (key, code) in [
            (None, "invalid_api_key"),
            (Some("wrong"), "invalid_api_key"),
            (Some(guess.as_str()), "invalid_api_key"),
            (Some(expired.as_str()), "expired_api_key"),
            (Some(revoked.as_str()), "revoked_api_key"),
        ] {
            let (status, given) = ask(key).await;
            match *who {
                "all" => assert!(![401, 403].contains(&status), "{method} {path}"),
                // These APIs have their own forms of errors, without a code.
                _ if path.starts_with("/api/") || path.starts_with("/v1/messages") => assert_eq!(status, 401),
                _ => assert_eq!((status, given), (401, json!(code)), "{method} {path} {key:?}"),
            }
        }
        for key in [user.as_str(), &other, "fixed"] {
            let (status, code) = ask(Some(key)).await;
            match *who {
                "admin" => assert_eq!((status, code), (403, json!("admin_key_required")), "{method} {path}"),
                _ => assert!(![401, 403].contains(&status), "{method} {path} {status}"),
            }
        }
        let (status, code) = ask(Some(&admin)).await;
        let expected = if path == "/admin/backup" {
            status == 403 && code == "local_only"
        } else {
            ![401, 403].contains(&status)
        };
        assert!(expected, "{method} {path} {status} {code}");
    }
    // Without a key, paths that do not exist reveal nothing.
    assert_eq!(server.ask("GET", "/admin/secrets", None, None).await.status, 401);
    assert_eq!(server.ask("GET", "/admin/secrets", Some(&admin), None).await.status, 404);
}

#[tokio::test]
async fn a_user_sees_its_own_usage_and_responses_only() {
    let server = server(scripted_with_tools(hello), None);
    let (one, two) =
        (server.key(json!({"name": "one", "team": "a"})), server.key(json!({"name": "two", "team": "b"})));
    let body = json!({"model": "default", "input": "hi"});
    let response = server.ask("POST", "/v1/responses", Some(&one), Some(&body)).await.json();
    let path = format!("/v1/responses/{}", response["id"].as_str().unwrap());
    assert_eq!(server.ask("GET", &path, Some(&two), None).await.status, 404);
    assert_eq!(server.ask("DELETE", &path, Some(&two), None).await.status, 404);
    let next = json!({"model": "default", "input": "more", "previous_response_id": response["id"]});
    assert_eq!(server.ask("POST", "/v1/responses", Some(&two), Some(&next)).await.status, 404);
    assert_eq!(server.ask("POST", "/v1/responses", Some(&one), Some(&next)).await.status, 200);
    assert_eq!(server.ask("GET", &path, Some(&one), None).await.status, 200);
    for query in ["", "?key=one", "?team=a"] {
        let usage = server.ask("GET", &format!("/admin/usage{query}"), Some(&two), None).await.json();
        assert_eq!(usage["total"]["requests"], 0, "{usage}");
        let records =
            server.ask("GET", &format!("/admin/usage/records{query}"), Some(&two), None).await.json();
        assert_eq!(records["records"], json!([]));
    }
    let mine = server.ask("GET", "/admin/me", Some(&one), None).await.json();
    assert_eq!((&mine["key"]["name"], &mine["usage"]["today"]["requests"]), (&json!("one"), &json!(2)));
    assert!(!mine.to_string().contains(&one[12..]), "a secret is shown once");
}

#[tokio::test]
async fn lists_of_models_have_what_the_key_may_use() {
    let server = server(scripted_with_tools(hello), None);
    let all = server.key(json!({"name": "all"}));
    let own = server.key(json!({"name": "own", "models": ["tiny-model", "other"]}));
    let other = server.key(json!({"name": "other", "models": ["other"]}));
    for path in ["/v1/models", "/api/tags", "/api/ps"] {
        let count = async |key: &str| {
            let list = server.ask("GET", path, Some(key), None).await.json();
            list.get("data").or(list.get("models")).unwrap().as_array().unwrap().len()
        };
        assert_eq!((count(&all).await, count(&own).await, count(&other).await), (1, 1, 0), "{path}");
    }
    let show = json!({"model": MODEL});
    let text = json!({"model": MODEL, "prompt": "a"});
    let tokens = json!({"model": MODEL, "tokens": [1]});
    let messages = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}]});
    for (method, path, body) in [
        ("GET", "/v1/models/default", None),
        ("GET", "/v1/models/house/tiny-model", None),
        ("POST", "/api/show", Some(&show)),
        ("POST", "/tokenize", Some(&text)),
        ("POST", "/detokenize", Some(&tokens)),
        ("POST", "/v1/messages/count_tokens", Some(&messages)),
    ] {
        let refused = server.ask(method, path, Some(&other), body).await;
        assert_eq!(refused.status.as_u16(), 403, "{path}: {}", refused.text);
        assert!(refused.text.contains("may not use"), "{path}: {}", refused.text);
        assert_eq!(server.ask(method, path, Some(&own), body).await.status, 200, "{path}");
    }
    // What is not there is not said to be forbidden.
    assert_eq!(server.ask("GET", "/v1/models/none", Some(&other), None).await.status, 404);
}

#[tokio::test]
async fn reports_about_what_is_not_known_are_refused_and_ages_are_times() {
    let server = server(scripted(hello), None);
    let admin = server.key(json!({"name": "admin", "role": "admin", "team": "lab"}));
    let ask = async |path: String| {
        let reply = server.ask("GET", &path, Some(&admin), None).await;
        (reply.status.as_u16(), reply.text)
    };
    for report in ["/admin/usage", "/admin/usage/records", "/admin/prompts"] {
        for format in ["json", "jsonl"] {
            for (field, name) in [("key", "zzz"), ("team", "zzz")] {
                let (status, text) = ask(format!("{report}?{field}={name}&format={format}")).await;
                assert_eq!(status, 400, "{report} {field} {format}: {text}");
                assert!(text.contains(&format!("no {field} \\\"zzz\\\" is known")), "{text}");
            }
        }
        // Known, but without usage.
        for known in ["key=admin", "team=lab"] {
            let (status, text) = ask(format!("{report}?{known}")).await;
            assert_eq!(status, 200, "{report} {known}: {text}");
        }
        let (status, text) = ask(format!("{report}?since=2026-11-02&until=2026-11-01")).await;
        assert!(status == 400 && text.contains("is empty"), "{report}: {status} {text}");
    }
    // This month's first day is later.
    let (status, text) = ask("/admin/usage?until=2020-01-01".into()).await;
    assert!(status == 400 && text.contains("is empty"), "{status} {text}");
    assert_eq!(server.ask("POST", CHAT, Some(&admin), Some(&chat(json!({})))).await.status, 200);
    for (since, requests) in [("7d", 1), ("24h", 1), ("90m", 1), ("2w", 1)] {
        let (status, text) = ask(format!("/admin/usage?since={since}&model=tiny-model")).await;
        assert_eq!(status, 200, "{since}: {text}");
        let report: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(report["total"]["requests"], requests, "{since}: {text}");
        let began: Time = serde_json::from_value(report["since"].clone()).unwrap();
        assert!(began < Now::read().time, "{since}: {text}");
        let (status, text) = ask(format!("/admin/audit?since={since}")).await;
        assert!(status == 200 && text.contains("key.create"), "{since}: {text}");
    }
    let (status, text) = ask("/admin/usage?since=yesterday".into()).await;
    assert!(status == 400 && text.contains("an age like 7d"), "{status} {text}");
    // A model that ran, though no key and no limit names it.
    let (status, text) =
        ask("/admin/usage?model=tiny-model&since=5s&until=2100-01-01&outcome=failed".into()).await;
    assert_eq!(status, 200, "{text}");
}

#[tokio::test]
async fn keys_live_over_http_and_every_act_is_in_the_audit_log() {
    let server = server(scripted(hello), None);
    let admin = server.key(json!({"name": "admin", "role": "admin"}));
    let ask = async |method: &str, path: &str, body: Value| {
        let body = (!body.is_null()).then_some(&body).cloned();
        server.ask(method, path, Some(&admin), body.as_ref()).await
    };
    let made = ask("POST", "/admin/keys", json!({"name": "ci", "owner": "ann", "models": ["other"]})).await;
    assert_eq!(made.status, 201);
    let secret = made.json()["secret"].as_str().unwrap().to_owned();
    let try_chat = async |secret: &str| server.ask("POST", CHAT, Some(secret), Some(&chat(json!({})))).await;
    let refused = try_chat(&secret).await;
    assert_eq!((refused.status.as_u16(), refused.error().3), (403, json!("model_not_allowed")));
    assert_eq!(ask("PATCH", "/admin/keys/ci", json!({"models": null})).await.status, 200);
    assert_eq!(try_chat(&secret).await.status, 200);
    let second = ask("POST", "/admin/keys/ci/rotate", json!({"grace_s": 60})).await.json();
    let second = second["secret"].as_str().unwrap().to_owned();
    assert_eq!(
        (try_chat(&secret).await.status, try_chat(&second).await.status),
        (200.try_into().unwrap(), 200.try_into().unwrap())
    );
    assert_eq!(ask("POST", "/admin/keys/ci/revoke", Value::Null).await.json()["key"]["state"], "revoked");
    assert_eq!(
        (try_chat(&secret).await.status, try_chat(&second).await.status),
        (401.try_into().unwrap(), 401.try_into().unwrap())
    );
    for (method, path, body, status, code) in [
        ("POST", "/admin/keys", json!({"name": "admin"}), 409, json!("key_exists")),
        ("POST", "/admin/keys", json!({"name": ""}), 400, Value::Null),
        ("POST", "/admin/keys", json!({"name": "x", "mood": 1}), 400, Value::Null),
        ("POST", "/admin/keys", json!({"name": "x", "expires": "2020-01-01"}), 400, Value::Null),
        ("GET", "/admin/keys/none", Value::Null, 404, json!("key_not_found")),
        ("POST", "/admin/keys/ci/rotate", Value::Null, 409, json!("key_revoked")),
        ("POST", "/admin/keys/admin/revoke", Value::Null, 409, json!("last_admin")),
        ("PUT", "/admin/limits", json!({"default": {"requests_per_minute": 0}}), 400, Value::Null),
        ("GET", "/admin/usage?by=mood", Value::Null, 400, Value::Null),
        ("GET", "/admin/usage?mood=1", Value::Null, 400, Value::Null),
        ("GET", "/admin/audit?limit=0", Value::Null, 400, Value::Null),
    ] {
        let reply = ask(method, path, body).await;
        assert_eq!((reply.status.as_u16(), reply.error().3), (status, code), "{method} {path}");
    }
    let read = ask("GET", "/admin/limits", Value::Null).await.json()["version"].clone();
    let policy = json!({"currency": "EUR", "teams": {"lab": {"weight": 2.0}}, "version": read});
    let set = ask("PUT", "/admin/limits", policy.clone()).await.json();
    assert_eq!(set["teams"]["lab"]["weight"], 2.0);
    // A second administrator, who has read the earlier limits.
    let late = ask("PUT", "/admin/limits", json!({"currency": "USD", "version": read})).await;
    assert_eq!((late.status.as_u16(), late.error().3), (412, json!("limits_changed")));
    assert_eq!(ask("GET", "/admin/limits", Value::Null).await.json(), set);
    let half =
        ask("PUT", "/admin/limits", json!({"teams": {"lab": {"limits": {"tokens_per_day": 1.5}}}})).await;
    assert_eq!(half.error().2, json!("teams.lab.limits.tokens_per_day"), "{}", half.text);
    for wrong in [json!({"version": 7}), json!([1]), json!("x")] {
        assert_eq!(ask("PUT", "/admin/limits", wrong).await.status, 400);
    }
    let audit = ask("GET", "/admin/audit?limit=3", Value::Null).await.json();
    let actions: Vec<_> =
        audit["entries"].as_array().unwrap().iter().map(|entry| entry["action"].clone()).collect();
    assert_eq!(actions, ["limits.set", "key.revoke", "key.rotate"]);
    assert!(audit["entries"][0]["actor"].as_str().unwrap().ends_with("(admin)"));
    let older = ask("GET", &format!("/admin/audit?before={}", audit["next"]), Value::Null).await.json();
    assert_eq!(older["entries"][0]["action"], "key.update");
    assert_eq!(ask("GET", "/admin/audit/verify", Value::Null).await.json()["intact"], true);
    let csv = ask("GET", "/admin/audit?format=csv", Value::Null).await;
    assert!(csv.headers["content-type"].to_str().unwrap().starts_with("text/csv"));
    assert_eq!(csv.text.lines().count(), 7, "{}", csv.text);
    let lines = ask("GET", "/admin/audit?format=jsonl", Value::Null).await.text;
    assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    assert!(![&secret, &second].iter().any(|secret| lines.contains(secret.as_str())));
}

/// Accepts the name of any model except one.
#[derive(Debug)]
struct Downloads;

impl Extension for Downloads {
    fn answer(&self, ask: &Ask<'_>) -> Option<Answer> {
        let body: Value = serde_json::from_slice(ask.body).unwrap_or_default();
        let refused = || Answer::error(400, "invalid_request", "no such model");
        let act = || Act { action: "model.pull", subject: Some("org/m".into()), details: json!({}) };
        (ask.path == "/admin/downloads").then(|| {
            if body["model"] == "none" {
                refused()
            } else {
                Answer { act: Some(act()), ..Answer::ok(json!({})) }
            }
        })
    }
}

#[tokio::test]
async fn a_download_is_in_the_audit_log_and_a_refused_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), None).unwrap();
    let config = ServerConfig {
        access: Some(access.clone()),
        extension: Some(Arc::new(Downloads)),
        ..ServerConfig::default()
    };
    let server = Server { router: router(scripted(hello), config), access, _folder: folder };
    let admin = server.key(json!({"name": "admin", "role": "admin"}));
    for (model, status) in [("none", 400), ("org/m", 200)] {
        let body = json!({"model": model});
        let reply = server.ask("POST", "/admin/downloads", Some(&admin), Some(&body)).await;
        assert_eq!(reply.status, status, "{}", reply.text);
    }
    let audit = server.ask("GET", "/admin/audit?action=model.pull", Some(&admin), None).await.json();
    let entries = audit["entries"].as_array().unwrap();
    assert_eq!((entries.len(), &entries[0]["subject"]), (1, &json!("org/m")), "{audit}");
    assert!(entries[0]["actor"].as_str().unwrap().ends_with("(admin)"), "{audit}");
}

#[tokio::test]
async fn limits_are_told_in_headers_and_errors_name_the_limit() {
    let server = server(scripted(hello), None);
    let limits = json!({"requests_per_minute": 2, "tokens_per_minute": 1000});
    let key = server.key(json!({"name": "ci", "limits": limits}));
    let ask = async |max: usize| {
        server.ask("POST", "/v1/completions", Some(&key), Some(&completion(json!({"max_tokens": max})))).await
    };
    let first = ask(20).await;
    assert_eq!(first.status, 200);
    let header = |reply: &Reply, name: &str| reply.headers[name].to_str().unwrap().to_owned();
    assert_eq!(header(&first, "x-ratelimit-limit-requests"), "2");
    assert_eq!(header(&first, "x-ratelimit-remaining-requests"), "1");
    // 2 tokens of the prompt and 20 of the answer are reserved.
    assert_eq!(header(&first, "x-ratelimit-remaining-tokens"), "978");
    assert!(header(&first, "x-ratelimit-reset-requests").ends_with('s'));
    assert_eq!(ask(20).await.status, 200);
    let refused = ask(20).await;
    let (message, kind, param, code) = refused.error();
    assert_eq!(
        (refused.status.as_u16(), kind.as_str(), code),
        (429, "rate_limit_error", json!("rate_limit_exceeded"))
    );
    assert_eq!(param, json!("key.requests_per_minute"));
    assert!(message.contains("limit of 2 requests a minute of key \"ci\""), "{message}");
    // A refusal has the same headers as an answer.
    assert_eq!(header(&refused, "x-ratelimit-limit-requests"), "2");
    assert_eq!(header(&refused, "x-ratelimit-remaining-requests"), "0");
    assert!(header(&refused, "x-ratelimit-reset-requests").ends_with('s'));
    let left: u64 = header(&refused, "x-ratelimit-remaining-tokens").parse().unwrap();
    assert!((1..1000).contains(&left), "{left}");
    let wait: u64 = header(&refused, "retry-after").parse().unwrap();
    assert!((55..=61).contains(&wait) && header(&refused, "x-should-retry") == "true", "{wait}");
    let policy = json!({"models": {MODEL: {"limits": {"tokens_per_month": 10}}}});
    let policy = serde_json::from_value(policy).unwrap();
    server.access.set_policy(policy, None, &Actor::local(), Now::read().time).unwrap();
    let other = server.key(json!({"name": "other"}));
    let reply = server.ask("POST", CHAT, Some(&other), Some(&chat(json!({"max_tokens": 1})))).await;
    assert_eq!((reply.status.as_u16(), reply.error().2), (429, json!("model.tokens_per_month")));
    let outcomes: Vec<_> = server.records().iter().map(|record| (record.outcome, record.count)).collect();
    assert_eq!(outcomes.iter().filter(|(outcome, _)| *outcome == Outcome::Refused).count(), 2);
    assert_eq!(outcomes.iter().filter(|(outcome, _)| *outcome == Outcome::Stop).count(), 2);
}

#[tokio::test]
async fn limits_are_told_in_headers_of_embeddings_too() {
    let script = |slot: Slot| {
        slot.send(thunder_engine::Event::Hidden { values: vec![1.0, 0.0] });
        slot.done(FinishReason::Length, 0);
    };
    let server = server(scripted(script), None);
    let key = server.key(json!({"name": "ci", "limits": {"requests_per_minute": 3}}));
    for (path, left) in [("/v1/embeddings", "2"), ("/api/embed", "1")] {
        let body = json!({"model": MODEL, "input": "a"});
        let reply = server.ask("POST", path, Some(&key), Some(&body)).await;
        assert_eq!(reply.status, 200, "{path} {}", reply.text);
        assert_eq!(reply.headers["x-ratelimit-remaining-requests"], left, "{path}");
    }
}

#[tokio::test]
async fn what_was_used_is_recorded_whatever_way_a_request_ends() {
    let script = |slot: Slot| match slot.request.max_tokens {
        Some(1) => {
            slot.delta("x");
            slot.done(FinishReason::Length, 1);
        }
        Some(2) => slot.fail("a rank was lost"),
        _ => hello(slot),
    };
    let server = server(scripted(script), None);
    let key = server.key(json!({"name": "ci", "owner": "ann", "team": "lab"}));
    for (body, status) in [
        (json!({"max_tokens": 1}), 200),
        (json!({"max_tokens": 2}), 500),
        (json!({"max_tokens": 20, "n": 2}), 200),
        (json!({"max_tokens": 20, "stream": true}), 200),
        (json!({"max_tokens": 20, "temperature": 9}), 400),
    ] {
        let reply = server.ask("POST", "/v1/completions", Some(&key), Some(&completion(body.clone()))).await;
        assert_eq!(reply.status, status, "{body} {}", reply.text);
    }
    let records = server.records();
    let of = |record: &UsageRecord| {
        (record.outcome, record.prompt_tokens, record.completion_tokens, record.status)
    };
    let expected = [
        (Outcome::Stop, 2, 4, 200),
        (Outcome::Stop, 2, 8, 200),
        (Outcome::Failed, 2, 0, 500),
        (Outcome::Length, 2, 1, 200),
    ];
    assert_eq!(records.iter().map(of).collect::<Vec<_>>(), expected);
    let newest = &records[0];
    assert_eq!(
        (newest.owner.as_deref(), newest.team.as_deref(), newest.api.as_str()),
        (Some("ann"), Some("lab"), "/v1/completions")
    );
    assert!(newest.id.starts_with("cmpl-") && newest.duration_us >= newest.first_token_us);
    let sums = server.ask("GET", "/admin/usage?by=team,outcome", Some(&key), None).await.json();
    assert_eq!(sums["total"]["requests"], 4, "{sums}");
    assert_eq!(sums["total"]["completion_tokens"], 13);
}

#[tokio::test]
async fn a_client_that_goes_away_is_recorded_and_frees_its_place() {
    let (engine, disconnects) = endless();
    let server = server(engine, Some(1));
    let limits = Limits { parallel_requests: Some(1), ..Limits::default() };
    let key = server.key(json!({"name": "ci", "limits": limits}));
    let mut request = post_request(CHAT, chat(json!({"stream": true, "max_tokens": 50})).to_string());
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    let response = server.router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let refused = server.ask("POST", CHAT, Some(&key), Some(&chat(json!({})))).await;
    assert_eq!((refused.status.as_u16(), refused.error().2), (429, json!("key.parallel_requests")));
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(response);
    expect_disconnects(disconnects, 1).await;
    let cancelled = server.records().into_iter().find(|record| record.outcome == Outcome::Cancelled).unwrap();
    assert_eq!(cancelled.status, 499);
    assert!(server.access.gate().unwrap().waiting() == 0);
}

/// A burst of one team, and single requests of another: a request of the second team waits for at
/// most the running request, and one more of the burst for each of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teams_burst_does_not_starve_another() {
    let mut held = Held::new();
    let server = Arc::new(server(held.engine.clone(), Some(1)));
    let burst = server.key(json!({"name": "burst", "team": "a"}));
    let other = server.key(json!({"name": "other", "team": "b"}));
    let ask = |key: &str, tokens: usize| {
        let (server, key) = (server.clone(), key.to_owned());
        tokio::spawn(async move {
            let body = chat(json!({"max_tokens": tokens}));
            let reply = server.ask("POST", CHAT, Some(&key), Some(&body)).await;
            assert_eq!(reply.status, 200, "{}", reply.text);
        })
    };
    let gate = server.access.gate().unwrap();
    let mut tasks: Vec<_> = (0..60).map(|_| ask(&burst, 4)).collect();
    until("the burst waits", || gate.waiting() == 59).await;
    tasks.extend((0..5).map(|_| ask(&other, 5)));
    until("all wait", || gate.waiting() == 64).await;
    held.open();
    for task in tasks {
        task.await.unwrap();
    }
    let places = held.places(5);
    assert!((1..).zip(&places).all(|(count, place)| *place <= 2 * count), "{:?}", held.order());
    assert_eq!(places.len(), 5);
    assert_eq!(held.most.load(Ordering::SeqCst), 1);
}

/// The same at a head, for callers named by the nodes of a cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_takes_turns_among_the_teams_that_nodes_name() {
    let mut held = Held::new();
    let gate = Gate::new(1);
    let config = |relay| ServerConfig { relay, gate: Some(gate.clone()), ..ServerConfig::default() };
    let routers = [true, false].map(|relay| router(held.engine.clone(), config(relay)));
    let [head, open] = &routers;
    let ask = |router: &Router, team: &str, tokens: usize| {
        let claimant = json!({"team": team, "weight": 1.0, "key": "k"}).to_string();
        let request = HttpRequest::builder().method("POST").uri(CHAT).header("x-thunder-claimant", claimant);
        let body = chat(json!({"max_tokens": tokens})).to_string();
        let request = request.header("content-type", "application/json").body(Body::from(body)).unwrap();
        let router = router.clone();
        tokio::spawn(async move { assert_eq!(send(router, request).await.status, 200) })
    };
    let mut tasks: Vec<_> = (0..40).map(|_| ask(head, "a", 4)).collect();
    until("the burst waits", || gate.waiting() == 39).await;
    // Clients of a server that accepts no requests from nodes cannot choose their caller name.
    tasks.push(ask(open, "b", 6));
    until("the stranger takes no turn", || held.places(6) == [1]).await;
    tasks.push(ask(head, "b", 5));
    until("all wait", || gate.waiting() == 40).await;
    held.open();
    for task in tasks {
        task.await.unwrap();
    }
    // The running one, the stranger, one more of the burst.
    assert!(held.places(5)[0] <= 3, "{:?}", held.order());
}

#[tokio::test]
async fn a_server_that_had_a_key_never_opens_to_all() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), None).unwrap();
    let config = ServerConfig { access: Some(access.clone()), ..ServerConfig::default() };
    let router = router(scripted(hello), config);
    let me = async || send(router.clone(), HttpRequest::get("/admin/me").body(Body::empty()).unwrap()).await;
    let open = me().await;
    assert_eq!(
        (open.status.as_u16(), &open.json()["role"], &open.json()["key"]),
        (200, &json!("admin"), &Value::Null)
    );
    let now = Now::read().time;
    access.create_key(NewKey { name: "a".into(), ..NewKey::default() }, &Actor::local(), now).unwrap();
    assert_eq!(me().await.status, 401);
    access.revoke_key("a", &Actor::local(), now).unwrap();
    assert_eq!(me().await.status, 401);
}

/// Like [`hello`], with two stages of a pipeline that report their work if requested.
fn watched_hello(slot: Slot) {
    use thunder_engine::{Event, RankWork, RequestWork, WorkTime};
    assert!(slot.request.reports_work, "a request that is traced asks for it");
    let ms = |ms| WorkTime { computed: Duration::from_millis(ms), waited: Duration::ZERO };
    let rank = RankWork { prefill: ms(1), decode: ms(7) };
    slot.delta("Hello");
    let work = RequestWork { ranks: vec![rank; 2], tensor_ranks: 1, prefill_steps: 1, decode_steps: 3 };
    slot.send(Event::Work(work));
    slot.done(FinishReason::Stop, 4);
}

#[tokio::test]
async fn a_request_is_a_trace_with_its_stages() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let received = tokio::task::spawn_blocking(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let (mut text, mut piece) = (String::new(), [0; 4096]);
        while !text.trim_end().ends_with("]}") {
            let count = stream.read(&mut piece).unwrap();
            text.push_str(std::str::from_utf8(&piece[..count]).unwrap());
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        text
    });
    let traces = thunder_traces::Traces::start(&address, &[], "thunder").unwrap();
    let config = ServerConfig { traces: Some(traces), ..ServerConfig::default() };
    let app = router(scripted(watched_hello), config);
    let mut request = post_request(CHAT, chat(json!({"max_tokens": 4})).to_string());
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    request.headers_mut().insert("traceparent", parent.parse().unwrap());
    assert_eq!(send(app, request).await.status, 200);
    let text = tokio::time::timeout(Duration::from_secs(10), received).await.unwrap().unwrap();
    let body: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
    let spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap();
    let below = |name: &str| {
        let above = spans.iter().find(|span| span["name"] == name).unwrap();
        spans.iter().filter(|span| span["parentSpanId"] == above["spanId"]).collect::<Vec<_>>()
    };
    for (name, first_us) in [("prefill", "1000"), ("decode", "7000")] {
        let stages = below(name);
        assert_eq!(stages.iter().map(|span| &span["name"]).collect::<Vec<_>>(), ["stage", "stage"]);
        let ranks = spans.iter().filter(|span| span["parentSpanId"] == stages[1]["spanId"]);
        let ranks: Vec<String> = ranks.map(ToString::to_string).collect();
        let has = |text: &str| ranks[0].contains(&format!("\"value\":{{\"intValue\":\"{text}\"}}"));
        assert!(ranks.len() == 1 && has("1") && has(first_us), "{ranks:?}");
    }
    let spans: Vec<&Value> =
        spans.iter().filter(|span| span["name"] != "rank" && span["name"] != "stage").collect();
    let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(names, [&format!("POST {CHAT}"), "gateway", "queue", "prefill", "decode"]);
    assert!(spans.iter().all(|span| span["traceId"] == "0af7651916cd43dd8448eb211c80319c"));
    let ends: Vec<_> = spans[1..]
        .windows(2)
        .map(|pair| pair[0]["endTimeUnixNano"] == pair[1]["startTimeUnixNano"])
        .collect();
    assert_eq!(ends, [true; 3]);
    assert!(
        body.to_string().contains("\"gen_ai.usage.output_tokens\",\"value\":{\"intValue\":\"4\"}"),
        "{body}"
    );
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(200))]

    /// Arbitrary requests of a stranger or an administrator to the administration paths never cause
    /// a server error, and leave the store unchanged.
    #[test]
    fn any_request_to_administration_is_answered(
        method in "GET|POST|PUT|PATCH|DELETE",
        path in "(keys|limits|usage|usage/records|audit|prompts|prompts/policy|me|backup|x)(/[a-z%0-9]{0,6}){0,2}(\\?[ -~&&[^#]]{0,40})?",
        key in "[ -~]{0,80}",
        body in "[\\[\\]{}\":,a-z0-9 .-]{0,60}",
        admin in proptest::prelude::any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = FUZZED.get_or_init(|| {
                let server = server(scripted(hello), None);
                let secret = server.key(json!({"name": "admin", "role": "admin"}));
                (server, secret)
            });
            let key = if admin { server.1.as_str() } else { key.as_str() };
            let uri = format!("/admin/{}", path.replace([' ', '"', '<', '>', '\\', '^', '`', '{', '|', '}'], "+"));
            let request = HttpRequest::builder().method(method.as_str()).uri(&uri).header("content-type", "application/json");
            let request = request.header("authorization", format!("Bearer {key}")).body(Body::from(body));
            // Bytes that are not an HTTP request do not reach the server.
            let Ok(request) = request else { return };
            let reply = send(server.0.router.clone(), request).await;
            assert!(reply.status.as_u16() < 500, "{uri} {} {}", reply.status, reply.text);
            assert!(admin || reply.status == 401, "{uri} {}", reply.status);
            assert_eq!(server.0.access.keys().len(), 1);
        });
    }
}

static FUZZED: std::sync::OnceLock<(Server, String)> = std::sync::OnceLock::new();
