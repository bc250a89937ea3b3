//! Prompts and answers kept by a policy.

use std::path::Path;

use axum::Router;
use axum::body::Body;
use axum::http::Request as HttpRequest;
use serde_json::{Value, json};
use thunder_access::{Access, Actor, NewKey, Now, Retention};
use thunder_server::{ServerConfig, router};

use crate::support::{Reply, chat, completion, hello, scripted, send};

const CHAT: &str = "/v1/chat/completions";
const SECRET: &str = "pw 4111 1111 1111 1111 ann@example.org plan";

struct Server {
    router: Router,
    access: Access,
    folder: tempfile::TempDir,
}

fn server() -> Server {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), None).unwrap();
    let config = ServerConfig { access: Some(access.clone()), ..ServerConfig::default() };
    Server { router: router(scripted(hello), config), access, folder }
}

impl Server {
    fn key(&self, new: Value) -> String {
        let new: NewKey = serde_json::from_value(new).unwrap();
        self.access.create_key(new, &Actor::local(), Now::read().time).unwrap().1
    }

    async fn ask(&self, method: &str, path: &str, key: &str, body: Option<Value>) -> Reply {
        let request = HttpRequest::builder().method(method).uri(path);
        let request = request.header("authorization", format!("Bearer {key}"));
        let request = request.header("content-type", "application/json");
        let body = body.map_or_else(Body::empty, |body| body.to_string().into());
        send(self.router.clone(), request.body(body).unwrap()).await
    }
}

/// Whether a file of a folder has these bytes.
fn holds(folder: &Path, text: &str) -> bool {
    std::fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => holds(&path, text),
            false => std::fs::read(&path).unwrap().windows(text.len()).any(|part| part == text.as_bytes()),
        }
    })
}

#[tokio::test]
async fn prompts_are_kept_only_by_a_policy_redacted_and_encrypted() {
    let server = server();
    let admin = server.key(json!({"name": "admin", "role": "admin"}));
    let user = server.key(json!({"name": "user", "team": "lab"}));
    let other = server.key(json!({"name": "other"}));
    let messages = json!([{"role": "user", "content": SECRET}]);
    let ask = async |key: &str, more: Value| {
        let mut body = chat(json!({"messages": messages}));
        more.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        assert_eq!(server.ask("POST", CHAT, key, Some(body)).await.status, 200);
    };
    let kept = async |query: &str| {
        let reply = server.ask("GET", &format!("/admin/prompts{query}"), &admin, None).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        reply.json()["prompts"].as_array().unwrap().clone()
    };
    ask(&user, json!({})).await;
    assert_eq!(kept("").await, [] as [Value; 0], "nothing is kept by default");
    server.access.move_records().unwrap();
    for text in ["4111 1111", "ann@example", " plan", "wörld"] {
        assert!(!holds(server.folder.path(), text), "{text} is in the store");
    }
    assert!(!server.folder.path().join("prompts").exists());

    let policy = json!({"teams": ["lab"], "patterns": ["^pw"], "days": 7});
    let set = server.ask("PUT", "/admin/prompts/policy", &admin, Some(policy)).await;
    assert_eq!((set.status.as_u16(), &set.json()["policy"]["days"]), (200, &json!(7)), "{}", set.text);
    ask(&user, json!({})).await;
    ask(&user, json!({"stream": true})).await;
    ask(&other, json!({})).await;
    // "hi" as tokens: kept as its text.
    let body = completion(json!({"prompt": [104, 105]}));
    assert_eq!(server.ask("POST", "/v1/completions", &user, Some(body)).await.status, 200);
    let found = kept("").await;
    assert_eq!(found.len(), 3, "two of the team's chats, and its completion: {found:?}");
    assert_eq!(found[0]["prompt"], json!([{"role": "prompt", "choice": 0, "text": "hi"}]));
    for one in &found[1..] {
        assert_eq!(one["prompt"], json!([{"role": "user", "text": "[redacted] [card] [email] plan"}]));
        assert_eq!(one["answer"], json!([{"role": "assistant", "choice": 0, "text": "Hello, wörld"}]));
        assert_eq!(
            (&one["key"], &one["outcome"], &one["api"]),
            (&json!("user"), &json!("stop"), &json!(CHAT))
        );
        assert_eq!((&one["redacted"], &one["is_cut"]), (&json!(3), &json!(false)));
    }
    assert_eq!(kept("?key=other").await.len(), 0);
    assert_eq!(kept("?team=lab&limit=1").await.len(), 1);
    for text in ["4111 1111", "ann@example", " plan", "wörld"] {
        assert!(!holds(server.folder.path(), text), "{text} is readable in the store");
    }
    assert!(server.folder.path().join("prompts").exists());
    let lines = server.ask("GET", "/admin/prompts?format=jsonl", &admin, None).await;
    assert_eq!(lines.text.lines().count(), 3);
    let (mut paged, mut before) = (Vec::new(), String::new());
    loop {
        let path = format!("/admin/prompts?limit=2{before}");
        let page = server.ask("GET", &path, &admin, None).await.json();
        assert_eq!(page["missing"], json!([]));
        paged.extend(page["prompts"].as_array().unwrap().clone());
        let Some(next) = page["next"].as_str() else { break };
        before = format!("&before={next}");
    }
    assert_eq!(paged, found);
    let wrong = server.ask("GET", "/admin/prompts?before=yesterday", &admin, None).await;
    assert!(wrong.status == 400 && wrong.text.contains("`next`"), "{}", wrong.text);
    // Readings and the policy are in the audit log; users read nothing.
    let audit = server.ask("GET", "/admin/audit?action=prompts.read", &admin, None).await.json();
    let entries = audit["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 7, "{audit}");
    assert_eq!(entries[2]["details"]["ids"].as_array().map(Vec::len), Some(3), "{audit}");
    assert!(entries[0]["actor"].as_str().unwrap().contains("(admin)"), "{audit}");
    let audit = server.ask("GET", "/admin/audit?action=prompts.policy", &admin, None).await.json();
    assert_eq!(audit["entries"][0]["details"]["teams"], json!(["lab"]));
    assert_eq!(server.ask("GET", "/admin/prompts", &user, None).await.status, 403);

    let off = server.ask("PUT", "/admin/prompts/policy", &admin, Some(json!({}))).await;
    assert_eq!(off.status, 200);
    ask(&user, json!({})).await;
    assert_eq!(kept("").await.len(), 3);
}

#[tokio::test]
async fn a_policy_that_cannot_be_followed_is_refused() {
    let server = server();
    let admin = server.key(json!({"name": "admin", "role": "admin"}));
    for (policy, words) in [
        (json!({"all": true, "patterns": ["("]}), "cannot be used"),
        (json!({"all": true, "days": 0}), "`days` is 0"),
        (json!({"all": true, "redact": ["names"]}), "unknown variant"),
        (json!({"everyone": true}), "unknown field"),
    ] {
        let reply = server.ask("PUT", "/admin/prompts/policy", &admin, Some(policy)).await;
        assert_eq!(reply.status, 400, "{}", reply.text);
        assert!(reply.text.contains(words), "{}", reply.text);
    }
    assert!(!server.access.keep_policy().is_on());
    let csv = server.ask("GET", "/admin/prompts?format=csv", &admin, None).await;
    assert_eq!(csv.status, 400);
}
