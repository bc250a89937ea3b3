//! Bodies that are too large, clients that read nothing, and clients that close their sending side.

use std::time::{Duration, Instant};

use axum::body::Body;
use futures_util::StreamExt;
use futures_util::stream;
use serde_json::{Value, json};
use thunder_access::{Access, Retention};
use thunder_engine::FinishReason;
use thunder_server::{ServerConfig, router};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::ServiceExt;

use crate::lifecycle::{connect, endless, expect_disconnects, rest, start};
use crate::support::{Held, chat, completion, get, hello, post, post_request, scripted, send, until};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn what_cannot_fit_is_refused_before_it_is_tokenized() {
    let engine = scripted(hello);
    let began = Instant::now();
    // Tokenizing 7 MB takes seconds.
    let long = "word ".repeat(1_400_000);
    let messages = json!([{"role": "user", "content": long}]);
    for (path, body) in [
        (CHAT, chat(json!({"messages": messages}))),
        ("/v1/completions", completion(json!({"prompt": long}))),
    ] {
        let reply = post(&engine, path, body).await;
        let (message, _, _, code) = reply.error();
        assert_eq!((reply.status.as_u16(), code), (400, json!("context_length_exceeded")));
        assert!(message.contains("bytes") && message.contains("64"), "{message}");
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_body_of_very_many_values_is_refused_while_it_is_read() {
    let engine = scripted(hello);
    let messages = vec![json!({"role": "user", "content": ""}); 250_000];
    let reply = post(&engine, CHAT, chat(json!({"messages": messages}))).await;
    assert_eq!(reply.status, 400);
    assert!(reply.error().0.contains("fields"), "{}", reply.error().0);
    for body in [format!("[{}0]", "0,".repeat(2_000_000)), format!("[{}0]", "[],".repeat(2_000_000))] {
        let reply = send(router(engine.clone(), ServerConfig::default()), post_request(CHAT, body)).await;
        assert_eq!(reply.status, 400);
        assert!(reply.error().0.contains("values"), "{}", reply.error().0);
    }
}

#[tokio::test]
async fn large_bodies_in_memory_are_limited_and_small_ones_pass() {
    let service = router(scripted(hello), ServerConfig::default());
    // Eight bodies of 8 MiB that do not end use all the memory for large bodies.
    let held: Vec<_> = (0..8)
        .map(|_| {
            let part = stream::iter([Ok::<_, std::io::Error>(vec![b' '; 8 << 20])]);
            let body = Body::from_stream(part.chain(stream::pending()));
            tokio::spawn(service.clone().oneshot(post_request(CHAT, body)))
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let reply = send(service.clone(), post_request(CHAT, " ".repeat(1 << 20))).await;
    assert_eq!((reply.status.as_u16(), reply.error().3), (429, json!("rate_limit_exceeded")));
    assert!(reply.headers.contains_key("retry-after"));
    let small = send(service.clone(), post_request(CHAT, chat(json!({})).to_string())).await;
    assert_eq!(small.status, 200);
    for held in held {
        held.abort();
        assert!(held.await.unwrap_err().is_cancelled());
    }
    // Their memory is free again: this body is read to its end.
    let reply = send(service, post_request(CHAT, " ".repeat(1 << 20))).await;
    assert_eq!(reply.status, 400);
}

/// Blocking clients read when they have sent all.
#[tokio::test]
async fn a_client_that_is_still_sending_reads_why_its_body_is_refused() {
    const BYTES: usize = 24 << 20;
    let server = start(scripted(hello), ServerConfig::default()).await;
    for framing in [format!("Content-Length: {BYTES}"), "Transfer-Encoding: chunked".to_owned()] {
        let is_chunked = framing.contains("chunked");
        let mut connection = TcpStream::connect(server.address).await.unwrap();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        let part = vec![b' '; 1 << 20];
        for _ in 0..BYTES >> 20 {
            if is_chunked {
                connection.write_all(b"100000\r\n").await.unwrap();
            }
            connection.write_all(&part).await.expect(&framing);
            if is_chunked {
                connection.write_all(b"\r\n").await.unwrap();
            }
            // The refusal arrives long before the last part is sent.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if is_chunked {
            connection.write_all(b"0\r\n\r\n").await.unwrap();
        }
        let mut answer = vec![0; 20];
        connection.read_exact(&mut answer).await.expect(&framing);
        assert!(answer.starts_with(b"HTTP/1.1 413"), "{framing}: {}", String::from_utf8_lossy(&answer));
    }
}

/// A body without an end is not read forever.
#[tokio::test]
async fn a_refused_body_is_dropped_for_seconds_only() {
    let began = Instant::now();
    let part = stream::iter([Ok::<_, std::io::Error>(vec![b' '; 9 << 20])]);
    let body = Body::from_stream(part.chain(stream::pending()));
    let reply = send(router(scripted(hello), ServerConfig::default()), post_request(CHAT, body)).await;
    assert_eq!(reply.status, 413);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_disconnected() {
    let (engine, disconnects) = endless_text();
    let config = ServerConfig { write_timeout: Duration::from_millis(200), ..ServerConfig::default() };
    let server = start(engine, config).await;
    let mut connection = connect(&server, chat(json!({"stream": true}))).await;
    connection.read_exact(&mut [0; 100]).await.unwrap();
    expect_disconnects(disconnects, 1).await;
    drop(connection);
}

/// Like [`endless`], with much more text than socket buffers hold.
fn endless_text() -> (thunder_engine::Engine, std::sync::mpsc::Receiver<()>) {
    let (gone, disconnects) = std::sync::mpsc::channel();
    let engine = scripted(move |slot| {
        while !slot.events.is_closed() {
            if slot.events.waiting_bytes() < 1 << 20 {
                slot.delta(&"x".repeat(1 << 16));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        drop(slot);
        let _ = gone.send(());
    });
    (engine, disconnects)
}

#[tokio::test]
async fn a_client_that_only_ends_its_sending_side_gets_its_answer() {
    let engine = scripted(|slot| {
        std::thread::sleep(Duration::from_millis(300));
        slot.delta("Hello");
        slot.done(FinishReason::Stop, 1);
    });
    for stream in [false, true] {
        let server = start(engine.clone(), ServerConfig::default()).await;
        let began = Instant::now();
        let mut connection = connect(&server, chat(json!({"stream": stream}))).await;
        connection.shutdown().await.unwrap();
        let text = rest(connection).await;
        // The connection was tested before anything was sent.
        let text = text.trim_start_matches("HTTP/1.1 100 Continue\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("Hello"), "{text}");
        // The connection is closed with the answer, not when the limit is over.
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
}

#[tokio::test]
async fn an_answer_to_a_half_closed_connection_of_http_1_0_is_limited() {
    let (engine, disconnects) = endless();
    let config = ServerConfig { half_closed_limit: Duration::from_millis(200), ..ServerConfig::default() };
    let server = start(engine, config).await;
    let body = chat(json!({})).to_string();
    let length = body.len();
    let request = format!(
        "POST {CHAT} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    let mut connection = TcpStream::connect(server.address).await.unwrap();
    connection.write_all(request.as_bytes()).await.unwrap();
    connection.shutdown().await.unwrap();
    expect_disconnects(disconnects, 1).await;
    assert_eq!(rest(connection).await, "", "nothing that HTTP/1.0 does not know");
}

#[tokio::test]
async fn a_head_without_end_is_refused() {
    let server = start(scripted(hello), ServerConfig::default()).await;
    let mut connection = TcpStream::connect(server.address).await.unwrap();
    connection.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n").await.unwrap();
    for _ in 0..1000 {
        if connection.write_all(format!("X-Filler: {}\r\n", "x".repeat(1000)).as_bytes()).await.is_err() {
            return;
        }
    }
    let mut reply = Vec::new();
    // The rest of the head may meet a connection that is closed already.
    let _ = connection.read_to_end(&mut reply).await;
    assert!(reply.is_empty() || reply.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&reply));
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = start(scripted(hello), ServerConfig::default()).await;
    let mut connection = TcpStream::connect(server.address).await.unwrap();
    let request = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let last = "GET /none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    connection.write_all((request.repeat(500) + last).as_bytes()).await.unwrap();
    let text = rest(connection).await;
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 500);
    assert!(text.rfind("HTTP/1.1 200 OK") < text.find("HTTP/1.1 404"));
}

#[tokio::test]
async fn health_answers_while_bodies_are_prepared() {
    let engine = scripted(hello);
    let service = router(engine.clone(), ServerConfig::default());
    let large = || Value::from("\"".repeat(3 << 20));
    let busy: Vec<_> = (0..4)
        .map(|_| {
            let body = completion(json!({"prompt": large()})).to_string();
            tokio::spawn(send(service.clone(), post_request("/v1/completions", body)))
        })
        .collect();
    let began = Instant::now();
    assert_eq!(get(&engine, "/health").await.status, 200);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    for busy in busy {
        assert_eq!(busy.await.unwrap().status, 400);
    }
}

#[tokio::test]
async fn connections_beyond_the_limit_are_refused_until_one_ends() {
    let server = start(scripted(hello), ServerConfig { max_connections: 1, ..ServerConfig::default() }).await;
    let get = async || {
        let mut connection = TcpStream::connect(server.address).await.unwrap();
        // A connection that is refused may be closed before it has sent this.
        let _ = connection.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        let mut reply = [0; 12];
        let _ = connection.read_exact(&mut reply).await;
        (connection, String::from_utf8_lossy(&reply).into_owned())
    };
    let (first, reply) = get().await;
    assert_eq!(reply, "HTTP/1.1 200");
    let refused = TcpStream::connect(server.address).await.unwrap();
    let text = rest(refused).await;
    assert!(text.starts_with("HTTP/1.1 503") && text.contains("retry-after: 1"), "{text}");
    drop(first);
    let deadline = Instant::now() + Duration::from_secs(5);
    while get().await.1 != "HTTP/1.1 200" {
        assert!(Instant::now() < deadline, "the place of a connection that ended is not free");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Linux has all addresses of 127.0.0.0/8.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_without_keys_take_turns_by_their_addresses() {
    let mut held = Held::new();
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), Some(1)).unwrap();
    let config = ServerConfig { access: Some(access.clone()), ..ServerConfig::default() };
    let server = start(held.engine.clone(), config).await;
    let address = server.address;
    let ask = move |from: [u8; 4], tokens: usize| async move {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        let body = chat(json!({"max_tokens": tokens})).to_string();
        let length = body.len();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        let mut connection = socket.connect(address).await.unwrap();
        connection.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        assert!(rest(connection).await.starts_with("HTTP/1.1 200"));
    };
    let mut tasks: Vec<_> = (0..60).map(|_| tokio::spawn(ask([127, 0, 0, 1], 4))).collect();
    let gate = access.gate().unwrap();
    until("the burst waits", || gate.waiting() == 59).await;
    tasks.push(tokio::spawn(ask([127, 0, 0, 2], 5)));
    until("all wait", || gate.waiting() == 60).await;
    held.open();
    for task in tasks {
        task.await.unwrap();
    }
    // In order of arrival it would be the last one.
    assert!(held.places(5)[0] <= 2, "{:?}", held.order());
}

#[tokio::test]
async fn a_request_ends_with_its_time_wherever_it_is() {
    let timed = |path: &str, seconds: &str, body: Value| {
        let mut request = post_request(path, body.to_string());
        request.headers_mut().insert("x-request-timeout", seconds.parse().unwrap());
        request
    };
    // An answer, a stream, and a request whose turn has not come.
    for (stream, limit) in [(false, None), (true, None), (false, Some(Duration::from_millis(200)))] {
        let (engine, disconnects) = endless();
        let config = ServerConfig { request_timeout: limit, ..ServerConfig::default() };
        let service = router(engine.clone(), config);
        let began = Instant::now();
        let seconds = if limit.is_some() { "60" } else { "0.2" };
        let reply = send(service, timed(CHAT, seconds, chat(json!({"stream": stream})))).await;
        let waited = began.elapsed();
        assert!(waited >= Duration::from_millis(200) && waited < Duration::from_secs(5), "{waited:?}");
        let text = &reply.text;
        assert!(text.contains("deadline_exceeded") && text.contains("200ms"), "{text}");
        assert_eq!(reply.status, if stream { 200 } else { 504 }, "{text}");
        expect_disconnects(disconnects, 1).await;
        assert_eq!(engine.load(), (0, 0));
    }
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), Some(1)).unwrap();
    let config = ServerConfig { access: Some(access.clone()), ..ServerConfig::default() };
    let (engine, _disconnects) = endless();
    let service = router(engine, config);
    let running = tokio::spawn(send(service.clone(), post_request(CHAT, chat(json!({})).to_string())));
    let gate = access.gate().unwrap();
    for path in [CHAT, "/v1/embeddings"] {
        let body = if path == CHAT { chat(json!({})) } else { json!({"model": "default", "input": "a"}) };
        let reply = send(service.clone(), timed(path, "0.1", body)).await;
        assert_eq!((reply.status.as_u16(), reply.error().3), (504, json!("deadline_exceeded")), "{path}");
        assert_eq!(reply.headers["x-should-retry"], "false");
        assert_eq!(gate.waiting(), 0, "{path}");
    }
    running.abort();
    let reply = send(service, timed(CHAT, "soon", chat(json!({})))).await;
    assert_eq!((reply.status.as_u16(), reply.error().3), (400, json!("invalid_header")));
}
