use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::SystemTime;

use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn trace(context: TraceContext) -> RequestTrace {
    let ms = Duration::from_millis;
    RequestTrace {
        context,
        name: "POST /v1/chat/completions".into(),
        began: SystemTime::UNIX_EPOCH + ms(1_000_000),
        duration: ms(500),
        stages: vec![
            Stage { name: "queue", begin: ms(5), end: ms(100) },
            Stage { name: "prefill", begin: ms(100), end: ms(200) },
        ],
        attributes: vec![Attribute::Integer("gen_ai.usage.input_tokens", 7)],
        failure: None,
    }
}

/// A collector that answers each message with `status`, and passes it on.
fn collector(status: &'static str) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut bytes = Vec::new();
            let whole = |bytes: &[u8]| {
                let text = String::from_utf8_lossy(bytes).into_owned();
                let (head, body) = text.split_once("\r\n\r\n")?;
                let length = head.lines().find_map(|line| {
                    line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok()
                });
                (body.len() == length?).then_some(text)
            };
            let text = loop {
                if let Some(text) = whole(&bytes) {
                    break text;
                }
                let mut piece = [0; 4096];
                let count = stream.read(&mut piece).unwrap();
                bytes.extend_from_slice(&piece[..count]);
            };
            write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}")
                .unwrap();
            sender.send(text).unwrap();
        }
    });
    (address, receiver)
}

#[test]
fn a_collector_receives_spans_that_belong_together() {
    let (address, received) = collector("200 OK");
    let traces = Traces::start(&address, &["x-key=secret".into()], "thunder").unwrap();
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    traces.send(trace(TraceContext::parse(parent).unwrap()));
    drop(traces);
    let message = received.recv_timeout(Duration::from_secs(10)).unwrap();
    let (head, body) = message.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /v1/traces ") && head.contains("x-key: secret"), "{head}");
    let body: Value = serde_json::from_str(body).unwrap();
    let resource = &body["resourceSpans"][0];
    assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "thunder");
    let spans = resource["scopeSpans"][0]["spans"].as_array().unwrap();
    assert_eq!(spans.len(), 3);
    assert!(spans.iter().all(|span| span["traceId"] == "0af7651916cd43dd8448eb211c80319c"));
    assert_eq!((&spans[0]["parentSpanId"], &spans[0]["kind"]), (&"b7ad6b7169203331".into(), &2.into()));
    assert!(spans[1..].iter().all(|span| span["parentSpanId"] == spans[0]["spanId"]));
    assert_eq!(spans[1]["startTimeUnixNano"], "1000005000000");
    assert_eq!(spans[0]["endTimeUnixNano"], "1000500000000");
    assert_eq!(spans[0]["attributes"][0]["value"]["intValue"], "7");
}

#[test]
fn a_collector_that_refuses_costs_traces_and_nothing_else() {
    let (address, received) = collector("503 Busy");
    let traces = Traces::start(&address, &[], "thunder").unwrap();
    traces.send(trace(TraceContext::new()));
    received.recv_timeout(Duration::from_secs(10)).unwrap();
    let began = Instant::now();
    while traces.dropped() == 0 {
        assert!(began.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(traces.dropped(), 1);
}

#[test]
fn what_cannot_work_is_refused_at_start() {
    assert!(matches!(Traces::start("127.0.0.1:4318", &[], "x"), Err(TracesError::Address(_))));
    for bad in ["secret", "=x", "a b=c", "a=b\r\nc: d"] {
        assert!(matches!(Traces::start("http://x", &[bad.into()], "x"), Err(TracesError::Header(1))));
    }
}

#[test]
fn malformed_parents_are_ignored() {
    for bad in [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
    ] {
        assert_eq!(TraceContext::parse(bad), None, "{bad}");
    }
    let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-what";
    assert_eq!(TraceContext::parse(later).map(|context| context.is_sampled), Some(false));
}

proptest! {
    #[test]
    fn any_header_is_read_or_ignored(text in "[ -~]{0,80}") {
        let _ = TraceContext::parse(&text);
    }
}
