//! Ranks that are started one by one, as by hand on several machines: what they say while they
//! wait, what they find out about each other, and how they share a machine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use common::{run_json, thunder};

/// A port that was free a moment ago.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Rank `rank` of a group, with these arguments.
fn rank(rank: usize, ranks: usize, address: &str, args: &[&str]) -> Command {
    let mut command = thunder(args);
    command.env("THUNDER_RANK", rank.to_string()).env("THUNDER_WORLD_SIZE", ranks.to_string());
    command.env("THUNDER_COORDINATOR", address).env("THUNDER_SECRET", "right");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn finish(child: Child) -> (bool, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.success(), said(&output))
}

#[test]
fn rank_0_says_for_whom_it_waits_and_whom_it_refused() {
    let address = free_address();
    let run = ["run", "builtin", "What is a rank?", "--wait", "4"];
    let first = rank(0, 2, &address, &run).spawn().unwrap();
    let wrong = rank(1, 2, &address, &run).env("THUNDER_SECRET", "wrong").output().unwrap();
    assert!(!wrong.status.success() && said(&wrong).contains("the secrets differ"), "{}", said(&wrong));
    let (succeeded, log) = finish(first);
    assert!(!succeeded, "{log}");
    assert!(log.contains("rank 0 of 2: refused 127.0.0.1: the secrets differ"), "{log}");
    assert!(log.contains(&format!("rank 0 of 2: waiting at {address} for rank 1, ")), "{log}");
    assert!(log.contains("rank 1 did not join within 4 s"), "{log}");
}

#[test]
fn a_coordinator_that_is_a_web_server_is_named_so() {
    // Accepts connections and waits for a request, as a web server does.
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap().to_string();
    let output = rank(1, 2, &address, &["run", "builtin", "hi", "--wait", "1"]).output().unwrap();
    let error = said(&output);
    assert!(!output.status.success() && !error.contains("os error"), "{error}");
    // The limit is 1 s, and a busy machine takes longer.
    assert!(error.contains(&format!("no coordinator at {address} within 1")), "{error}");
    assert!(error.contains("(connected, but no rank answers there)"), "{error}");
}

#[test]
fn the_option_in_which_ranks_differ_is_named() {
    for (option, value, words) in [
        ("--kv", "int8", "--kv is int8 on rank 1, but f16 on rank 0"),
        ("--max-batch", "3", "--max-batch is 3 on rank 1, but 16 on rank 0"),
        ("--activations", "bf16", "--activations is bf16 on rank 1, but auto on rank 0"),
        ("--split", "3,1", "--split is 3,1 on rank 1, but even on rank 0"),
    ] {
        let (address, run) = (free_address(), ["run", "builtin", "hi", "--wait", "20"]);
        let first = rank(0, 2, &address, &run).spawn().unwrap();
        let second = rank(1, 2, &address, &[&run[..], &[option, value]].concat()).spawn().unwrap();
        for (succeeded, log) in [finish(first), finish(second)] {
            assert!(!succeeded && log.contains(words), "{option}: {log}");
        }
    }
}

#[test]
fn the_kv_cache_is_among_the_first_words_and_in_a_plan() {
    let output = thunder(&["run", "builtin", "hi", "--max-tokens", "1"]).output().unwrap();
    let first = said(&output).lines().next().unwrap().to_owned();
    assert!(first.starts_with("KV cache: ") && first.contains("32,768 tokens"), "{first}");
    assert!(first.contains("--memory"), "{first}");
    let plan = |options: &[&str]| run_json(&[&["plan", "--device", "cpu", "--json"], options].concat());
    let whole = plan(&[]);
    assert_eq!(whole["kv_cache"]["tokens"], 32_768, "{whole}");
    assert_eq!(whole["device"], "cpu", "{whole}");
    let little = plan(&["--memory", "24M"]);
    assert_eq!(little["memory_bytes"], 24 << 20, "{little}");
    let (tokens, bytes) = (&little["kv_cache"]["tokens"], little["kv_cache"]["bytes"].as_u64().unwrap());
    assert!(tokens.as_u64().unwrap() < 32_768 && bytes < 24 << 20, "{little}");
    let none = plan(&["--memory", "1M"]);
    assert!(none["kv_cache"].is_null(), "{none}");
}

/// MLX's launcher spins, and takes a core from its ranks, while it can write to their input.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_of_mlxs_launcher_leaves_no_room_in_its_input() {
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    let folder = tempfile::tempdir().unwrap();
    let hosts = folder.path().join("hosts.json");
    std::fs::write(&hosts, format!(r#"[["{}"], ["127.0.0.1:1"]]"#, free_address())).unwrap();
    let mut command = thunder(&["run", "builtin", "hi", "--wait", "30"]);
    command.env("MLX_RANK", "0").env("MLX_HOSTFILE", &hosts);
    let mut rank = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let input = rank.stdin.take().unwrap();
    let began = Instant::now();
    loop {
        let mut poll = libc::pollfd { fd: input.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one descriptor that is open, and no wait.
        if unsafe { libc::poll(&mut poll, 1, 0) } == 0 {
            break;
        }
        assert_eq!(rank.try_wait().unwrap(), None);
        assert!(began.elapsed() < Duration::from_secs(20), "the input has room");
        std::thread::sleep(Duration::from_millis(10));
    }
    rank.kill().unwrap();
    rank.wait().unwrap();
}

/// Both ranks would compute with all cores if they did not learn that they share a machine.
#[test]
#[cfg(target_os = "linux")]
fn ranks_that_nobody_started_together_divide_the_cores() {
    use std::io::{BufRead, BufReader};

    let address = free_address();
    let serve = ["serve", "builtin", "--port", "0"];
    let mut ranks = [0, 1].map(|number| rank(number, 2, &address, &serve).spawn().unwrap());
    let lines = BufReader::new(ranks[0].stderr.take().unwrap()).lines();
    let is_serving = lines.map_while(Result::ok).any(|line| line.contains("serving"));
    let compute_threads = |process: u32| {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
        // The thread that starts the others computes too.
        1 + names.filter(|name| name.starts_with("compute-")).count()
    };
    let threads = ranks.each_ref().map(|rank| compute_threads(rank.id()));
    for rank in &mut ranks {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
    assert!(is_serving);
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(threads, [(cores / 2).max(1); 2], "{cores} cores");
}
