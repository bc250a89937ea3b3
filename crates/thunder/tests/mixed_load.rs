//! Mixed load on two ranks: requests of all APIs, clients that go away, bodies that are wrong, cut
//! off or too long. Every request has an end, and afterwards the server holds what it held before.
//! Clients that send nothing, half a body, or do not read slow nobody else.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::Server;
use serde_json::{Value, json};
use thunder_testing::{Random, is_long};

/// Clients at a time: more than slots, so that some always wait.
const CLIENTS: u64 = 12;
/// A request that has no end after this long has none.
const PATIENCE: Duration = Duration::from_secs(120);
/// Requests whose clients are gone have ended after this long, on a machine that does other things.
const SETTLED: Duration = Duration::from_secs(5);

/// What a client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    Whole,
    Stream,
    /// Reads some of a stream and goes away.
    LeaveMidway,
    /// Goes away before anything has come.
    LeaveAtOnce,
    WrongBody,
    /// Ends within the body.
    HalfBody,
    /// A prompt that fills most of the context, and is read to its end.
    LongPrompt,
    /// The same, and the client goes away during prefill.
    LeaveLongPrompt,
    TooLongPrompt,
}

const ACTS: [Act; 9] = [
    Act::Whole,
    Act::Stream,
    Act::LeaveMidway,
    Act::LeaveAtOnce,
    Act::WrongBody,
    Act::HalfBody,
    Act::LongPrompt,
    Act::LeaveLongPrompt,
    Act::TooLongPrompt,
];

/// A path, its body, and what ends its stream.
fn request(random: &mut Random, words: usize, stream: bool) -> (&'static str, Value, &'static str) {
    let text: String = (0..words).map(|_| format!("word{} ", random.below(1000))).collect();
    let messages = json!([{"role": "user", "content": text}]);
    let tokens = 1 + random.below(24);
    let (path, mut body, end) = match random.below(5) {
        0 => ("/v1/chat/completions", json!({"messages": messages, "max_tokens": tokens}), "data: [DONE]"),
        1 => {
            let form = json!({"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": {
                "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false,
            }}});
            let body = json!({"messages": messages, "max_tokens": tokens, "response_format": form});
            ("/v1/chat/completions", body, "data: [DONE]")
        }
        2 => {
            let body =
                json!({"prompt": text, "max_tokens": tokens, "n": 1 + random.below(3), "temperature": 1});
            ("/v1/completions", body, "data: [DONE]")
        }
        3 => ("/v1/messages", json!({"messages": messages, "max_tokens": tokens}), "event: message_stop"),
        _ => {
            ("/api/chat", json!({"messages": messages, "options": {"num_predict": tokens}}), "\"done\":true")
        }
    };
    body["model"] = "default".into();
    body["stream"] = stream.into();
    (path, body, end)
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends a request whose head announces `length` bytes.
fn send(stream: &mut TcpStream, path: &str, body: &[u8], length: usize) {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    );
    // The server may refuse a body before it has come.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

/// Everything until the server ends the connection. Panics if that takes too long.
fn read_all(stream: &mut TcpStream) -> String {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return String::from_utf8_lossy(&all).into_owned(),
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                return String::from_utf8_lossy(&all).into_owned();
            }
            Err(error) => panic!("{error} after {}", String::from_utf8_lossy(&all)),
        }
    }
}

/// The status of an answer, 0 if there is none.
fn status(answer: &str) -> u16 {
    answer.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0)
}

/// One request. Panics if its end is not the right one.
fn act(act: Act, random: &mut Random, address: &str) {
    let mut stream = connect(address);
    let is_stream = !matches!(act, Act::Whole) && (act != Act::LongPrompt || random.below(2) == 0);
    let words = match act {
        Act::LongPrompt | Act::LeaveLongPrompt => 120,
        Act::TooLongPrompt => 20_000,
        _ => 1 + random.below(30) as usize,
    };
    let (path, body, end) = request(random, words, is_stream);
    let bytes = body.to_string().into_bytes();
    let length = bytes.len();
    match act {
        Act::Whole | Act::Stream | Act::LongPrompt => {
            send(&mut stream, path, &bytes, length);
            let answer = read_all(&mut stream);
            // 429: more wait than may.
            match status(&answer) {
                200 if is_stream => assert!(answer.contains(end), "{path} has no end: {answer}"),
                200 => assert!(answer.contains('}'), "{path}: {answer}"),
                429 => assert!(answer.to_ascii_lowercase().contains("retry-after"), "{answer}"),
                _ => panic!("{path}: {answer}"),
            }
        }
        Act::TooLongPrompt => {
            send(&mut stream, path, &bytes, length);
            let answer = read_all(&mut stream);
            assert!([400, 413].contains(&status(&answer)), "{path}: {answer}");
        }
        Act::WrongBody => {
            let mut wrong = bytes;
            match random.below(4) {
                0 => wrong.truncate(length / 2),
                1 => wrong[length / 2] = 0xff,
                2 => wrong = br#"{"model": "default", "mood": [1, {}]}"#.to_vec(),
                _ => wrong = vec![b'['; 1 + random.below(20_000) as usize],
            }
            send(&mut stream, path, &wrong, wrong.len());
            let answer = read_all(&mut stream);
            // A byte within a text may leave it a body.
            assert!([200, 400, 429].contains(&status(&answer)), "{path}: {answer}");
        }
        Act::HalfBody => {
            send(&mut stream, path, &bytes[..length / 2], length);
            let _ = stream.shutdown(Shutdown::Write);
            let answer = read_all(&mut stream);
            assert!([0, 400, 408].contains(&status(&answer)), "{path}: {answer}");
        }
        Act::LeaveAtOnce => send(&mut stream, path, &bytes, length),
        Act::LeaveMidway | Act::LeaveLongPrompt => {
            send(&mut stream, path, &bytes, length);
            let wait = if act == Act::LeaveMidway { 2000 } else { 20 };
            stream.set_read_timeout(Some(Duration::from_millis(wait))).unwrap();
            // Some of the head, or nothing in time.
            let _ = stream.read(&mut [0; 200]);
        }
    }
}

/// The numbers of `/metrics` by name, summed over labels.
fn metrics(address: &str) -> BTreeMap<String, f64> {
    let mut stream = connect(address);
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let text = read_all(&mut stream);
    let number = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.split('{').next()?.to_owned(), value.parse::<f64>().ok()?))
    };
    let mut sums = BTreeMap::new();
    for (name, value) in text.lines().filter(|line| !line.starts_with('#')).filter_map(number) {
        *sums.entry(name).or_insert(0.0) += value;
    }
    sums
}

/// What the server's processes hold: bytes of memory, and descriptors.
fn held(processes: &[i32]) -> (u64, usize) {
    let memory = |id: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    let descriptors = |id: &i32| std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().count();
    (processes.iter().map(memory).sum(), processes.iter().map(descriptors).sum())
}

/// Waits until nothing runs or waits, and no request holds blocks. Panics if that takes long.
fn settle(address: &str) {
    let until = Instant::now() + SETTLED;
    loop {
        let now = metrics(address);
        let left = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
            .map(|name| now[name]);
        if left == [0.0; 3] {
            return;
        }
        assert!(Instant::now() < until, "running, waiting, share of blocks: {left:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// All clients at work for this long. Returns how often each thing was done.
fn load(address: &str, seed: u64, duration: Duration) -> BTreeMap<Act, usize> {
    let counts = Mutex::new(BTreeMap::new());
    let until = Instant::now() + duration;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let counts = &counts;
            scope.spawn(move || {
                let mut random = Random::new(seed << 8 | client);
                while Instant::now() < until {
                    let what = ACTS[random.below(ACTS.len() as u64) as usize];
                    act(what, &mut random, address);
                    *counts.lock().unwrap().entry(what).or_insert(0) += 1;
                }
            });
        }
    });
    counts.into_inner().unwrap()
}

/// Processor time of processes so far, in seconds.
fn processor_s(processes: &[i32]) -> f64 {
    // SAFETY: asks for a number.
    let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    let ticks = |id: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
        let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
        fields.skip(11).take(2).map(|field| field.parse::<f64>().unwrap()).sum::<f64>()
    };
    processes.iter().map(ticks).sum::<f64>() / ticks_per_s
}

/// Milliseconds of a short request: the median of many, and the processor's mean.
fn request_ms(address: &str, processes: &[i32]) -> [f64; 2] {
    const REQUESTS: usize = 60;
    let (began, mut times) = (processor_s(processes), Vec::new());
    for _ in 0..REQUESTS {
        let start = Instant::now();
        let body = json!({"model": "default", "prompt": "What is a rank?", "max_tokens": 8});
        assert_eq!(common::post(&format!("{address}/v1/completions"), &body).0, 200);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    [times[REQUESTS / 2], (processor_s(processes) - began) * 1e3 / REQUESTS as f64]
}

/// 500 idle connections, half of them with half a head; half-sent bodies, small and large; streams
/// that nobody reads.
fn crowd(address: &str) -> Vec<TcpStream> {
    let mut all = Vec::new();
    for number in 0..500 {
        let mut idle = connect(address);
        if number % 2 == 0 {
            idle.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: loc").unwrap();
        }
        all.push(idle);
    }
    for number in 0..100 {
        let mut half = connect(address);
        let length = if number % 4 == 0 { 4 << 20 } else { 2000 };
        send(&mut half, "/v1/chat/completions", &vec![b' '; length / 2], length);
        all.push(half);
    }
    let mut random = Random::new(3);
    for _ in 0..40 {
        let mut unread = connect(address);
        let (path, body, _) = request(&mut random, 10, true);
        let body = body.to_string().into_bytes();
        send(&mut unread, path, &body, body.len());
        all.push(unread);
    }
    all
}

#[test]
fn idle_half_sent_and_unread_connections_slow_nobody() {
    let arguments = ["builtin", "--ranks", "2", "--threads", "1", "--max-batch", "4", "--no-store"];
    let server = Server::start(&arguments);
    let address = server.url("").trim_end_matches('/').to_owned();
    let processes = [vec![server.id()], server.children()].concat();
    request_ms(&address, &processes);
    let (_, descriptors) = held(&processes);
    // Time that a virtual machine's host takes counts too, so the fastest of several rounds counts.
    let fastest = || {
        let rounds = [(); 3].map(|()| request_ms(&address, &processes));
        [0, 1].map(|index| rounds.iter().map(|round| round[index]).fold(f64::MAX, f64::min))
    };
    let before = fastest();
    let crowd = crowd(&address);
    settle(&address);
    // What the crowd has sent is received first.
    request_ms(&address, &processes);
    let during = fastest();
    let (_, descriptors_during) = held(&processes);
    drop(crowd);
    let until = Instant::now() + PATIENCE;
    while held(&processes).1 > descriptors {
        assert!(Instant::now() < until, "{} descriptors, {descriptors} before", held(&processes).1);
        std::thread::sleep(Duration::from_millis(50));
    }
    let after = fastest();
    println!(
        "[ms a request, of them the processor's] {before:.1?}, with the crowd {during:.1?}, after {after:.1?}"
    );
    assert!(
        descriptors_during >= descriptors + 550,
        "{descriptors_during} descriptors: the crowd is not there"
    );
    // Other tests run at the same time: what waits for a crowd waits for seconds.
    let most = |index: usize| f64::max(before[index], after[index]);
    assert!(during[0] <= 3.0 * most(0) + 10.0 && during[1] <= 1.5 * most(1) + 1.0);
}

#[test]
fn mixed_load_leaves_nothing_behind_and_every_request_ends() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&[
        "builtin",
        "--cache-dir",
        folder.path().to_str().unwrap(),
        "--cache-size",
        "8M",
        "--ranks",
        "2",
        "--threads",
        "1",
        "--max-batch",
        "4",
        "--context",
        "2048",
        "--no-store",
    ]);
    let address = server.url("");
    let processes = [vec![server.id()], server.children()].concat();
    assert_eq!(processes.len(), 2);
    // Grammars, buffers and threads that stay are made now.
    let (warm_up, duration) = if is_long() { (60, 600) } else { (2, 4) };
    load(&address, 1, Duration::from_secs(warm_up));
    settle(&address);
    let (memory, descriptors) = held(&processes);
    let before = metrics(&address);
    let done = load(&address, 2, Duration::from_secs(duration));
    settle(&address);
    println!("{done:?}");
    assert!(ACTS.iter().all(|act| done.contains_key(act)), "{done:?}");
    // Connections that clients have left close a moment later.
    let until = Instant::now() + PATIENCE;
    let (mut memory_after, mut descriptors_after) = held(&processes);
    while descriptors_after > descriptors && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(100));
        (memory_after, descriptors_after) = held(&processes);
    }
    println!("memory {memory} then {memory_after}, descriptors {descriptors} then {descriptors_after}");
    assert!(descriptors_after <= descriptors, "{descriptors} descriptors, then {descriptors_after}");
    // The allocator keeps some of what was freed.
    let allowed = memory / 10 + (24 << 20);
    assert!(memory_after <= memory + allowed, "{memory} bytes, then {memory_after}");
    let after = metrics(&address);
    let finished = after["vllm:request_success_total"] - before["vllm:request_success_total"];
    assert!(finished >= done[&Act::Stream] as f64 * 0.5, "{finished} answers, {done:?}");
    // The server still answers.
    let (status, _) = common::post(
        &server.url("/v1/completions"),
        &json!({"model": "default", "prompt": "a", "max_tokens": 2}),
    );
    assert_eq!(status, 200);
}
