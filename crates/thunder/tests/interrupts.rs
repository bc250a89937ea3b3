//! Ctrl-C: the first one asks, the second one ends the program and its ranks at once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Server, children, post, thunder};
use serde_json::json;

/// Grace times are longer.
const AT_ONCE: Duration = Duration::from_secs(3);

fn signal(process: i32, signal: i32) {
    // SAFETY: a process of this test.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

fn assert_gone(ranks: &[i32]) {
    let deadline = Instant::now() + AT_ONCE;
    for rank in ranks {
        // SAFETY: signal 0 only asks whether the process exists.
        while unsafe { libc::kill(*rank, 0) } == 0 {
            assert!(Instant::now() < deadline, "rank {rank} is left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn wait_at_once(child: &mut Child) -> std::process::ExitStatus {
    let deadline = Instant::now() + AT_ONCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < deadline, "the program did not end at once");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_second_interrupt_ends_a_server_at_once() {
    let mut server = Server::start(&["builtin", "--ranks", "2", "--max-batch", "1", "--threads", "1"]);
    let ranks = server.children();
    let requests: Vec<_> = (0..16)
        .map(|_| {
            let url = server.url("/v1/completions");
            // One after the other, so that they take longer than this test.
            let body = json!({ "model": "builtin", "prompt": "a", "max_tokens": 2000, "ignore_eos": true });
            std::thread::spawn(move || std::panic::catch_unwind(|| post(&url, &body)))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    server.signal(libc::SIGINT);
    std::thread::sleep(Duration::from_millis(500));
    server.signal(libc::SIGINT);
    let (status, log) = server.wait(AT_ONCE);
    assert_eq!(status.signal(), Some(libc::SIGINT), "{log}");
    assert!(log.contains("have 30 s to complete") && log.contains("Ctrl-C again ends at once"), "{log}");
    assert!(!log.contains("lost"), "the ranks were ended, not lost: {log}");
    assert_gone(&ranks);
    requests.into_iter().for_each(|request| drop(request.join()));
}

#[test]
fn an_interrupted_run_ends_with_its_ranks() {
    let mut command = thunder(&["run", "builtin", "What is a rank?", "--ranks", "3", "--threads", "1"]);
    // Token 2 would end the answer.
    command.args(["--logit-bias", "2=-100", "--max-tokens", "1900"]).env("THUNDER_KERNEL", "portable");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
    let ranks = children(child.id());
    assert_eq!(ranks.len(), 2);
    signal(child.id() as i32, libc::SIGINT);
    let status = wait_at_once(&mut child);
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert_eq!(status.signal(), Some(libc::SIGINT), "{log}");
    assert!(log.contains("Ctrl-C again ends at once") && !log.contains("error"), "{log}");
    assert_gone(&ranks);
}

#[test]
fn a_second_interrupt_kills_launched_ranks_at_once() {
    let script = "trap '' TERM; echo ready; while :; do sleep 0.1; done";
    let mut command = thunder(&["launch", "-n", "2", "--grace", "60", "--", "sh", "-c", script]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("ready"));
    assert!(lines.next().unwrap().unwrap().contains("ready"));
    signal(child.id() as i32, libc::SIGINT);
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let told = log.next().unwrap().unwrap();
    assert!(told.contains("60 s") && told.contains("Ctrl-C again kills them at once"), "{told}");
    assert!(child.try_wait().unwrap().is_none(), "it waits for the ranks");
    signal(child.id() as i32, libc::SIGINT);
    assert_eq!(wait_at_once(&mut child).code(), Some(128 + libc::SIGINT));
}
