//! Requests as bytes on a connection, with methods, paths, headers and bodies that no normal client
//! sends; and streams of any model text, read by a strict reader.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::Config;
use serde_json::{Value, json};
use thunder_engine::{Engine, FinishReason};
use thunder_server::{ServerConfig, router, serve};
use thunder_testing::runs;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::support::{Slot, anything, post_request, scripted_with_tools, send};

/// A request that takes longer than this hangs.
const LIMIT: Duration = Duration::from_secs(20);

/// A server that listens, for all cases of a test.
struct Listening {
    runtime: Runtime,
    engine: Engine,
    address: SocketAddr,
    /// Where the same engine is served with the usual limits of time.
    patient: SocketAddr,
}

fn listening() -> &'static Listening {
    static SERVER: OnceLock<Listening> = OnceLock::new();
    SERVER.get_or_init(|| {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let engine = scripted_with_tools(anything);
        let listen = |config| {
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
            let address = listener.local_addr().unwrap();
            let (sender, configs) = tokio::sync::watch::channel(config);
            let serving = engine.clone();
            runtime.spawn(async move {
                // It never changes, and lives as long as the server.
                let _sender = sender;
                serve(serving, listener, configs, std::future::pending()).await
            });
            address
        };
        // The server soon gives up on a body that is announced but does not arrive.
        let hasty = ServerConfig { read_timeout: Duration::from_millis(300), ..ServerConfig::default() };
        let (address, patient) = (listen(hasty), listen(ServerConfig::default()));
        Listening { runtime, engine, address, patient }
    })
}

/// The server's complete answer to these bytes.
async fn answer(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that has answered and closed need not read the rest.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    // A reset after the answer also ends it.
    let _ = stream.read_to_end(&mut answer).await;
    answer
}

/// The statuses of the final responses in an answer. Each response must be complete. The first one
/// answers a request with this method.
fn statuses(method: &[u8], answer: &[u8]) -> Vec<u16> {
    let mut statuses = Vec::new();
    let mut rest = answer;
    while !rest.is_empty() {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response.parse(rest).unwrap_or_else(|error| panic!("{error}: {}", shown(rest)));
        let httparse::Status::Complete(length) = parsed else { panic!("half a head: {}", shown(rest)) };
        let status = response.code.unwrap();
        let header = |name: &str| {
            let found = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
            found.map(|header| String::from_utf8_lossy(header.value).into_owned())
        };
        rest = &rest[length..];
        if status < 200 {
            continue;
        }
        statuses.push(status);
        let body = match (header("content-length"), header("transfer-encoding")) {
            // Such a response only states the length of the body for GET.
            _ if method == b"HEAD" && statuses.len() == 1 => Vec::new(),
            (Some(length), _) => {
                let (body, after) = rest.split_at(length.parse().unwrap());
                rest = after;
                body.to_vec()
            }
            (None, Some(_)) => chunks(&mut rest),
            (None, None) => std::mem::take(&mut rest).to_vec(),
        };
        if header("content-type").is_some_and(|kind| kind.starts_with("application/json")) && !body.is_empty()
        {
            serde_json::from_slice::<Value>(&body)
                .unwrap_or_else(|error| panic!("{error}: {}", shown(&body)));
        }
    }
    statuses
}

/// The bytes of a chunked body.
fn chunks(rest: &mut &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let Ok(httparse::Status::Complete((start, size))) = httparse::parse_chunk_size(rest) else {
            panic!("no chunk: {}", shown(rest))
        };
        let end = start + size as usize;
        body.extend_from_slice(&rest[start..end]);
        *rest = &rest[end + 2..];
        if size == 0 {
            return body;
        }
    }
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(600)]).into_owned()
}

/// Methods that exist, that do not exist, and that are not valid tokens.
fn methods() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        6 => prop::sample::select(&["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"][..])
            .prop_map(|name| name.as_bytes().to_vec()),
        1 => prop::sample::select(&["TRACE", "CONNECT", "get", "PRI", "X"][..]).prop_map(|name| name.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..12),
    ]
}

/// Paths of the API, with parts that are encoded, empty, dots, very long, or not text.
fn paths() -> impl Strategy<Value = Vec<u8>> {
    let known = prop::sample::select(
        &[
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/responses",
            "/v1/models",
            "/api/chat",
            "/admin/keys",
            "/admin/usage",
            "/metrics",
            "/health",
            "/",
            "/app.js",
            "/auth",
            "/v1/responses/x",
            "*",
            "http://localhost/v1/models",
        ][..],
    );
    let part = prop_oneof![
        3 => "[a-zA-Z0-9._~-]{0,12}".prop_map(String::into_bytes),
        2 => "(%[0-9a-fA-F]{2}|%2e%2e|%00|%ff|%|%zz){1,4}".prop_map(String::into_bytes),
        1 => Just(b"..".to_vec()),
        1 => Just(b"".to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..20),
        1 => (1usize..80_000).prop_map(|length| vec![b'a'; length]),
    ];
    let query = prop_oneof![2 => Just(Vec::new()), 1 => "\\?[ -~]{0,60}".prop_map(String::into_bytes)];
    (known, prop::collection::vec(part, 0..4), query).prop_map(|(known, parts, query)| {
        let mut path = known.as_bytes().to_vec();
        parts.iter().for_each(|part| path = [path.as_slice(), b"/", part].concat());
        [path, query].concat()
    })
}

/// Headers that servers read, with values of any bytes: many, huge, and repeated.
fn headers() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![
        5 => prop::sample::select(
            &[
                "host", "content-type", "content-length", "transfer-encoding", "authorization", "x-api-key", "expect",
                "connection", "origin", "accept-encoding", "if-none-match", "traceparent", "x-request-timeout",
                "x-thunder-relay", "x-thunder-claimant", "upgrade", "sec-fetch-site", "content-encoding",
            ][..],
        )
        .prop_map(|name| name.as_bytes().to_vec()),
        1 => "[a-zA-Z0-9-]{1,20}".prop_map(String::into_bytes),
        1 => prop::collection::vec(any::<u8>(), 0..10),
    ];
    let value = prop_oneof![
        3 => prop::sample::select(
            &[
                "application/json", "localhost", "evil.example", "0", "5", "-1", "18446744073709551616", "1e9", "chunked",
                "gzip, chunked", "100-continue", "keep-alive", "close", "Bearer ", "Bearer x", "00-0-0-0", "*", "gzip;q=x",
                "{\"team\":1}", "h2c",
            ][..],
        )
        .prop_map(|value| value.as_bytes().to_vec()),
        2 => "[ -~]{0,60}".prop_map(String::into_bytes),
        2 => prop::collection::vec(any::<u8>(), 0..40),
        1 => (1usize..70_000).prop_map(|length| vec![b'v'; length]),
    ];
    let line = (name, value).prop_map(|(name, value)| [name.as_slice(), b": ", &value, b"\r\n"].concat());
    let some = prop::collection::vec(line.clone(), 0..8);
    // As many as a head may have, and more.
    let many = (line, 1usize..400).prop_map(|(line, count)| vec![line; count]);
    prop_oneof![6 => some, 1 => many].prop_map(|lines| lines.concat())
}

/// Bodies that are cut off, deeply nested, of wrong types, with huge numbers, or not JSON.
fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let whole = json!({
        "model": "default", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "max_tokens": 2,
        "stream": true,
    });
    let whole = whole.to_string();
    let cut = (0..whole.len()).prop_map(move |length| whole.as_bytes()[..length].to_vec());
    let deep = (1usize..3000, "[\\[{]").prop_map(|(depth, open)| {
        let open = if open == "[" { "[" } else { "{\"a\":" };
        format!("{{\"model\":\"default\",\"messages\":{}", open.repeat(depth)).into_bytes()
    });
    let value = "(1e309|-0|1e-400|99999999999999999999999|null|true|\\[\\]|\\{\\}|\"\\\\ud800\"|\"x\"|0\\.1)";
    let odd = (
        prop::sample::select(&["max_tokens", "temperature", "messages", "stop", "stream", "n", "seed"][..]),
        value,
    )
        .prop_map(|(name, value)| {
            format!("{{\"model\":\"default\",\"prompt\":\"x\",\"messages\":[],\"{name}\":{value}}}")
                .into_bytes()
        });
    prop_oneof![2 => cut, 1 => deep, 3 => odd, 1 => prop::collection::vec(any::<u8>(), 0..300), 1 => Just(Vec::new())]
}

proptest! {
    #![proptest_config(Config { cases: runs(400, 20_000) as u32, max_shrink_iters: 200, ..Config::default() })]

    #[test]
    fn any_bytes_get_whole_responses_and_none_is_our_fault(
        method in methods(), path in paths(), headers in headers(), body in bodies(), announces in any::<bool>(),
    ) {
        let Listening { runtime, engine, address, patient } = listening();
        let length = if announces {
            format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len())
        } else {
            String::new()
        };
        let begin = [method.as_slice(), b" ", &path, b" HTTP/1.1\r\nhost: localhost\r\n"].concat();
        let request = [begin.as_slice(), &headers, length.as_bytes(), b"\r\n", &body].concat();
        let (answered, health) = runtime.block_on(async {
            let answered = tokio::time::timeout(LIMIT, answer(*address, &request)).await;
            let health = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            (answered, answer(*patient, health).await)
        });
        let answered = answered.map_err(|_| TestCaseError::fail("it hangs"))?;
        let statuses = statuses(&method, &answered);
        prop_assert!(statuses.iter().all(|status| *status < 500), "{statuses:?}: {}", shown(&answered));
        prop_assert_eq!(crate::fuzz_http::statuses(b"GET", &health), [200]);
        // The disconnection of a client is noticed a moment later.
        let began = Instant::now();
        while engine.load() != (0, 0) {
            prop_assert!(began.elapsed() < LIMIT, "a slot is held");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Answers with the prompt, in pieces of a few letters.
fn repeats(slot: Slot) {
    let prompt: Vec<u8> = slot.request.prompt.iter().map(|id| *id as u8).collect();
    let letters: Vec<char> = String::from_utf8(prompt).unwrap().chars().collect();
    letters.chunks(3).for_each(|piece| slot.delta(&piece.iter().collect::<String>()));
    slot.done(FinishReason::Stop, letters.len());
}

/// The data of an event stream, parsed as in the HTML standard: fields in lines, events that end
/// with an empty line, and no rest.
fn events(text: &str) -> Vec<Value> {
    assert!(text.ends_with("\n\n"), "it ends within an event: {text:?}");
    let mut events = Vec::new();
    for event in text.split("\n\n").filter(|event| !event.is_empty()) {
        // A lone carriage return would end a line too.
        assert!(!event.contains('\r'), "{event:?}");
        let mut data = Vec::new();
        for line in event.lines() {
            match line.split_once(": ") {
                Some(("data", value)) => data.push(value),
                Some(("event", _)) => {}
                _ => assert!(line.starts_with(':'), "no field: {line:?}"),
            }
        }
        let data = data.join("\n");
        if data != "[DONE]" && !data.is_empty() {
            events.push(serde_json::from_str(&data).unwrap_or_else(|error| panic!("{error}: {data}")));
        }
    }
    events
}

proptest! {
    #![proptest_config(Config { cases: runs(150, 10_000) as u32, ..Config::default() })]

    /// Any text of a model, including lines, quotes and fields of event streams.
    #[test]
    fn a_strict_reader_finds_the_models_text_in_every_apis_stream(
        said in "([a-z ]|\\PC|[\n\r\t\"\\\\{}<>:\u{0}\u{2028}\u{feff}]|data: |event: x\n\n|\\[DONE\\]){1,40}",
    ) {
        let engine = scripted_with_tools(repeats);
        let router = router(engine, ServerConfig::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let messages = json!([{"role": "user", "content": said}]);
        let joined = |values: Vec<Value>, pointer: &str| -> String {
            values.iter().filter_map(|value| value.pointer(pointer)?.as_str()).collect()
        };
        for (path, more, pointer) in [
            ("/v1/chat/completions", json!({"messages": messages}), "/choices/0/delta/content"),
            ("/v1/completions", json!({"prompt": said}), "/choices/0/text"),
            ("/v1/messages", json!({"messages": messages, "max_tokens": 4000}), "/delta/text"),
            ("/v1/responses", json!({"input": said}), "/delta"),
            ("/api/chat", json!({"messages": messages}), "/message/content"),
        ] {
            let mut body = json!({"model": "default", "stream": true});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let reply = runtime.block_on(send(router.clone(), post_request(path, body.to_string())));
            prop_assert_eq!(reply.status.as_u16(), 200, "{}: {}", path, reply.text);
            let values = if path.starts_with("/api/") {
                reply.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
            } else {
                events(&reply.text)
            };
            let text = joined(values, pointer);
            let expected = if path == "/v1/completions" { said.clone() } else { format!("u:{said}|") };
            prop_assert_eq!(text, expected, "{}", path);
        }
    }
}
