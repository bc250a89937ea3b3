//! Keys, models, health, disconnecting clients and shutdown, over real sockets where necessary.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request as HttpRequest;
use futures_util::StreamExt;
use serde_json::{Value, json};
use thunder_engine::{Engine, Event, Fault, FinishReason};
use thunder_server::{ServerConfig, ServerError, check_binding, router, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tower::ServiceExt;

use crate::support::{CONTEXT, MODEL, Slot, chat, get, hello, post_request, scripted, send, silent};

const CHAT: &str = "/v1/chat/completions";
const LIMIT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn models_are_listed_and_found_by_name() {
    let engine = scripted(hello);
    let list = get(&engine, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let model = &list["data"][0];
    assert_eq!((&model["id"], &model["object"]), (&json!(MODEL), &json!("model")));
    assert_eq!(model["context_length"], CONTEXT);
    assert!(model["created"].as_u64().unwrap() > 1_700_000_000);
    assert!(model["owned_by"].is_string());
    for path in ["/v1/models/house/tiny-model", "/v1/models/house%2Ftiny-model", "/v1/models/tiny-model"] {
        assert_eq!(get(&engine, path).await.json()["id"], MODEL, "{path}");
    }
}

#[tokio::test]
async fn health_counts_running_and_waiting_requests() {
    let (engine, _inbox) = silent(4);
    let _stream = engine.submit(request()).unwrap();
    let health = get(&engine, "/health").await;
    assert_eq!(health.status, 200);
    let expected = json!({"status": "ok", "model": MODEL, "ranks": 2, "running": 0, "waiting": 1});
    assert_eq!(health.json(), expected);
}

fn request() -> thunder_engine::Request {
    thunder_engine::Request {
        prompt: vec![1],
        sampling: thunder_engine::Sampling::default(),
        max_tokens: None,
        stop: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        ..thunder_engine::Request::default()
    }
}

#[tokio::test]
async fn every_path_under_v1_needs_a_key() {
    let config =
        ServerConfig { api_keys: vec!["first-key".into(), "second".into()], ..ServerConfig::default() };
    let service = router(scripted(hello), config);
    let ask = async |path: &str, authorization: Option<&str>| {
        let mut request = HttpRequest::get(path);
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        send(service.clone(), request.body(Body::empty()).unwrap()).await
    };
    for wrong in
        [None, Some("Bearer"), Some("Bearer "), Some("Bearer firs"), Some("first-key"), Some("Basic second")]
    {
        for path in ["/v1/models", CHAT, "/v1/unknown"] {
            let reply = ask(path, wrong).await;
            assert_eq!(
                (reply.status.as_u16(), reply.error().3),
                (401, json!("invalid_api_key")),
                "{wrong:?} {path}"
            );
            assert_eq!(reply.headers["www-authenticate"], "Bearer");
        }
    }
    for right in ["Bearer first-key", "bearer second"] {
        assert_eq!(ask("/v1/models", Some(right)).await.status, 200);
        assert_eq!(ask("/v1/unknown", Some(right)).await.status, 404);
    }
    assert_eq!(ask("/health", None).await.status, 200);
}

#[test]
fn other_machines_need_a_key() {
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    let key = ["a-key".to_owned()];
    for local in ["127.0.0.1:80", "127.8.8.8:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
        check_binding(address(local), &[], None).unwrap();
    }
    for open in ["0.0.0.0:80", "192.168.1.2:80", "[::]:80", "[fe80::1]:80"] {
        let error = check_binding(address(open), &[], None).unwrap_err();
        assert!(error.to_string().contains("127.0.0.1"), "{error}");
        check_binding(address(open), &key, None).unwrap();
    }
    for bad in ["", " ", "a b", "ключ", "a\n"] {
        let keys = ["good".to_owned(), bad.to_owned()];
        assert!(matches!(check_binding(address("127.0.0.1:80"), &keys, None), Err(ServerError::BadKey(2))));
    }
}

/// An engine that sends text until its client disconnects, then reports the disconnect.
pub fn endless() -> (Engine, mpsc::Receiver<()>) {
    let (gone, disconnects) = mpsc::channel();
    let engine = scripted(move |slot: Slot| {
        let begun = Instant::now();
        while !slot.events.is_closed() && begun.elapsed() < LIMIT {
            slot.delta("word ");
            std::thread::sleep(Duration::from_millis(2));
        }
        if slot.events.is_closed() {
            drop(slot);
            let _ = gone.send(());
        }
    });
    (engine, disconnects)
}

pub async fn expect_disconnects(disconnects: mpsc::Receiver<()>, count: usize) {
    let wait = move || (0..count).all(|_| disconnects.recv_timeout(LIMIT).is_ok());
    assert!(tokio::task::spawn_blocking(wait).await.unwrap(), "the engine saw no disconnect");
}

#[tokio::test]
async fn dropping_a_streams_body_cancels_all_its_completions() {
    let (engine, disconnects) = endless();
    let service = router(engine.clone(), ServerConfig::default());
    let response =
        service.oneshot(post_request(CHAT, chat(json!({"stream": true, "n": 3})).to_string())).await.unwrap();
    assert_eq!(response.status(), 200);
    drop(response);
    expect_disconnects(disconnects, 3).await;
    assert_eq!(engine.load(), (0, 0));
}

/// Tokio's paused clock jumps to the next timer whenever no task can run.
#[tokio::test(start_paused = true)]
async fn a_stream_begins_and_is_kept_alive_before_the_first_token() {
    let (engine, mut inbox) = silent(4);
    let service = router(engine, ServerConfig::default());
    let asked = post_request(CHAT, chat(json!({"stream": true})).to_string());
    let response = service.oneshot(asked).await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body().into_data_stream();
    let comment = body.next().await.unwrap().unwrap();
    assert!(comment.starts_with(b":"), "{comment:?}");
    inbox
        .submissions
        .recv()
        .await
        .unwrap()
        .events
        .send(Event::Failed { message: "no luck".into(), fault: Fault::Engine });
    let last = body.next().await.unwrap().unwrap();
    assert!(last.starts_with(b"data: {\"error\":{\"message\":\"no luck\""), "{last:?}");
    assert!(body.next().await.is_none());
}

pub struct Server {
    pub address: SocketAddr,
    configs: watch::Sender<ServerConfig>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServerError>>,
}

pub async fn start(engine: Engine, config: ServerConfig) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let shutdown = async { stopped.await.unwrap_or(()) };
    let (configs, latest) = watch::channel(config);
    Server { address, configs, stop, task: tokio::spawn(serve(engine, listener, latest, shutdown)) }
}

pub async fn connect(server: &Server, body: Value) -> TcpStream {
    let body = body.to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(server.address).await.unwrap();
    connection.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    connection
}

pub async fn rest(mut connection: TcpStream) -> String {
    let mut text = String::new();
    tokio::time::timeout(LIMIT, connection.read_to_string(&mut text))
        .await
        .expect("the stream hangs")
        .unwrap();
    text
}

#[tokio::test]
async fn a_client_that_closes_its_connection_frees_the_slot() {
    for stream in [true, false] {
        let (engine, disconnects) = endless();
        let server = start(engine.clone(), ServerConfig::default()).await;
        let mut connection = connect(&server, chat(json!({"stream": stream}))).await;
        if stream {
            connection.read_exact(&mut [0; 400]).await.unwrap();
        } else {
            while engine.load().0 == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        drop(connection);
        let begun = Instant::now();
        expect_disconnects(disconnects, 1).await;
        assert!(begun.elapsed() < LIMIT / 2, "at once, not after {:?}", begun.elapsed());
        assert_eq!(engine.load(), (0, 0));
        server.stop.send(()).unwrap();
        server.task.await.unwrap().unwrap();
    }
}

/// An engine whose answers take a fifth of a second.
fn twenty_words() -> Engine {
    scripted(|slot| {
        for _ in 0..20 {
            slot.delta("word ");
            std::thread::sleep(Duration::from_millis(10));
        }
        slot.done(FinishReason::Stop, 20);
    })
}

#[tokio::test]
async fn a_shutdown_lets_completions_finish() {
    let server = start(twenty_words(), ServerConfig::default()).await;
    let mut connection = connect(&server, chat(json!({"stream": true}))).await;
    connection.read_exact(&mut [0; 100]).await.unwrap();
    server.stop.send(()).unwrap();
    let text = rest(connection).await;
    assert_eq!(text.matches("word ").count(), 20);
    assert!(text.contains("data: [DONE]\n\n"));
    server.task.await.unwrap().unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}

#[tokio::test]
async fn new_settings_hold_for_new_connections_and_end_no_answer() {
    let server = start(twenty_words(), ServerConfig::default()).await;
    let unused = TcpStream::connect(server.address).await.unwrap();
    let mut answered = connect(&server, chat(json!({"stream": true}))).await;
    answered.read_exact(&mut [0; 100]).await.unwrap();
    server.configs.send_replace(ServerConfig { api_keys: vec!["k".into()], ..ServerConfig::default() });
    let mut text = String::new();
    while !text.contains("data: [DONE]\n\n") {
        let mut part = [0; 4096];
        let read = tokio::time::timeout(LIMIT, answered.read(&mut part)).await.unwrap().unwrap();
        assert_ne!(read, 0, "the answer breaks off: {text}");
        text += &String::from_utf8_lossy(&part[..read]);
    }
    assert_eq!(text.matches("word ").count(), 20);
    // Open connections are not lost either, and now need the key.
    let request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    for mut connection in [unused, answered] {
        connection.write_all(request).await.unwrap();
        let text = rest(connection).await;
        assert!(text.contains("HTTP/1.1 401"), "{text}");
    }
    server.stop.send(()).unwrap();
    server.task.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_shutdown_reaches_answers_that_began_with_earlier_settings() {
    let (engine, disconnects) = endless();
    let server = start(engine, ServerConfig::default()).await;
    let mut connection = connect(&server, chat(json!({"stream": true}))).await;
    connection.read_exact(&mut [0; 100]).await.unwrap();
    let grace = Duration::from_millis(100);
    server.configs.send_replace(ServerConfig { grace, ..ServerConfig::default() });
    server.stop.send(()).unwrap();
    let text = rest(connection).await;
    assert!(text.contains("data: {\"error\":{\"message\":\"the server is shutting down\""), "{text}");
    server.task.await.unwrap().unwrap();
    expect_disconnects(disconnects, 1).await;
}

#[tokio::test]
async fn after_the_grace_time_completions_end_with_an_error() {
    let (engine, disconnects) = endless();
    let config = ServerConfig { grace: Duration::from_millis(100), ..ServerConfig::default() };
    let server = start(engine, config).await;
    let mut connection = connect(&server, chat(json!({"stream": true}))).await;
    connection.read_exact(&mut [0; 100]).await.unwrap();
    let begun = Instant::now();
    server.stop.send(()).unwrap();
    let text = rest(connection).await;
    assert!(text.contains("data: {\"error\":{\"message\":\"the server is shutting down\""), "{text}");
    assert!(!text.contains("[DONE]"));
    server.task.await.unwrap().unwrap();
    expect_disconnects(disconnects, 1).await;
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_client_that_does_not_read_does_not_delay_a_shutdown() {
    let engine = scripted(|slot| {
        let begun = Instant::now();
        // Much more than the socket buffers hold.
        for _ in 0..100 {
            slot.delta(&"x".repeat(1 << 20));
        }
        while !slot.events.is_closed() && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    let config = ServerConfig { grace: Duration::from_millis(100), ..ServerConfig::default() };
    let server = start(engine, config).await;
    let mut connection = connect(&server, chat(json!({"stream": true}))).await;
    connection.read_exact(&mut [0; 100]).await.unwrap();
    server.stop.send(()).unwrap();
    tokio::time::timeout(LIMIT, server.task).await.expect("the server hangs").unwrap().unwrap();
}

#[tokio::test]
async fn idle_connections_are_closed_and_do_not_delay_a_shutdown() {
    let config = ServerConfig { read_timeout: Duration::from_millis(100), ..ServerConfig::default() };
    let server = start(scripted(hello), config).await;
    let mut unfinished = TcpStream::connect(server.address).await.unwrap();
    unfinished.write_all(b"GET /health HT").await.unwrap();
    let mut idle = TcpStream::connect(server.address).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    assert!(rest(idle).await.starts_with("HTTP/1.1 200"));
    assert!(!rest(unfinished).await.contains("200 OK"));

    let server = start(scripted(hello), ServerConfig::default()).await;
    let unused = TcpStream::connect(server.address).await.unwrap();
    let mut used = TcpStream::connect(server.address).await.unwrap();
    used.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    used.read_exact(&mut [0; 12]).await.unwrap();
    server.stop.send(()).unwrap();
    tokio::time::timeout(LIMIT, server.task).await.expect("the server hangs").unwrap().unwrap();
    assert!(rest(unused).await.is_empty());
}

#[tokio::test]
async fn a_key_that_no_client_can_send_is_refused_at_start() {
    let config = ServerConfig { api_keys: vec![String::new()], ..ServerConfig::default() };
    let server = start(scripted(hello), config).await;
    assert!(matches!(server.task.await.unwrap(), Err(ServerError::BadKey(1))));
}
