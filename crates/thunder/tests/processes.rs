//! Processes of the program: killed ranks, leftovers, CPU time while idle, memory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Server, children, exchange, metric, post, run_json, thunder};
use serde_json::{Value, json};
use thunder_testing::gguf::Gguf;
use thunder_testing::{idle::falls_quiet, runs};

/// A model folder with the shapes of a 1B model, of which it has this number of layers.
fn synth(dir: &tempfile::TempDir, name: &str, layers: &str) -> String {
    let folder = dir.path().join(name).to_str().unwrap().to_owned();
    let options = ["model", "synth", "--arch", "llama-1b", "--bits", "4", "--layers", layers, &folder];
    let made = thunder(&options).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    folder
}

fn exists(process: i32) -> bool {
    // SAFETY: signal 0 only asks whether the process exists.
    unsafe { libc::kill(process, 0) == 0 }
}

/// A memory field of a process's status in bytes; 0 if the field is missing.
fn memory(process: i32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.map_or(0, |line| line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024)
}

#[test]
fn a_killed_rank_ends_requests_with_an_error_and_leaves_nothing() {
    let plain = [("tensor", 1), ("tensor", 2), ("pipeline", 1)].map(|case| (case, None));
    for ((parallel, victim), draft) in plain.into_iter().chain([(("tensor", 2), Some("builtin"))]) {
        let mut options = vec!["--model", "builtin", "--ranks", "3", "--parallel", parallel];
        options.extend(draft.iter().flat_map(|draft| ["--draft", draft]));
        let mut server = Server::start(&options);
        let ranks = server.children();
        assert_eq!(ranks.len(), 2, "rank 0 started two others");
        let url = server.url("/v1/completions");
        let request = std::thread::spawn(move || {
            let body = json!({ "model": "builtin", "prompt": "a", "max_tokens": 2000, "ignore_eos": true });
            post(&url, &body)
        });
        let began = Instant::now();
        while metric(&server, "vllm:num_requests_running") == 0.0 {
            assert!(began.elapsed() < Duration::from_secs(60), "the request does not run");
        }
        let killed = Instant::now();
        // SAFETY: a process of this test.
        unsafe { libc::kill(ranks[victim - 1], libc::SIGKILL) };
        let (status, answer) = request.join().unwrap();
        assert!(killed.elapsed() < Duration::from_secs(5), "the request ended after {:?}", killed.elapsed());
        assert_eq!(status, 500, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(&format!("rank {victim} is lost")), "{message}");
        let (status, log) = server.wait(Duration::from_secs(30));
        assert!(!status.success(), "the server ends with an error");
        assert!(
            log.contains(&format!("rank {victim} was killed by signal 9 (SIGKILL): out of memory?")),
            "{log}"
        );
        assert!(!ranks.into_iter().any(exists), "a process is left");
    }
}

#[test]
fn a_rank_that_dies_while_the_model_loads_ends_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let folder = synth(&dir, "model", "16");
    // A busy machine may hold this thread up until the model is loaded, but not each time.
    for transport in ["shm", "tcp"] {
        let is_told = (0..5).any(|_| dies_while_loading(&folder, transport));
        assert!(is_told, "{transport}: the model was always loaded before the rank died");
    }
}

/// Kills a rank while a model loads. False if the model was loaded before.
fn dies_while_loading(folder: &str, transport: &str) -> bool {
    let mut server =
        thunder(&["serve", "--model", folder, "--port", "0", "--ranks", "3", "--transport", transport])
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
    let began = Instant::now();
    let ranks = loop {
        assert!(began.elapsed() < Duration::from_secs(10), "no ranks were started");
        let ranks = children(server.id());
        if ranks.len() == 2 {
            break ranks;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    // Its share is more than 200 MiB. How long loading takes depends on what the page cache
    // holds.
    while memory(ranks[1], "VmRSS:") < 50 << 20 {
        assert!(began.elapsed() < Duration::from_secs(30), "rank 2 does not load");
        std::thread::sleep(Duration::from_millis(1));
    }
    let killed = Instant::now();
    // SAFETY: a process of this test.
    unsafe { libc::kill(ranks[1], libc::SIGKILL) };
    let status = server.wait().unwrap();
    let after = killed.elapsed();
    println!("{transport}: a loss was noticed after {after:?}");
    let mut log = String::new();
    server.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(!status.success() && log.contains("rank 2 was killed by signal 9"), "{log}");
    assert!(after < Duration::from_secs(5), "the whole ended after {after:?}");
    assert!(!ranks.into_iter().any(exists), "a process is left");
    !log.contains("serving")
}

#[test]
fn an_idle_server_with_a_killed_rank_ends() {
    let mut server = Server::start(&["--model", "builtin", "--ranks", "2"]);
    // SAFETY: a process of this test.
    unsafe { libc::kill(server.children()[0], libc::SIGKILL) };
    let (status, log) = server.wait(Duration::from_secs(30));
    assert!(!status.success() && log.contains("rank 1 was killed by signal 9"), "{log}");
}

#[test]
fn servers_that_end_leave_no_ranks() {
    for (signal, is_clean) in [(libc::SIGTERM, true), (libc::SIGINT, true), (libc::SIGKILL, false)] {
        let mut server = Server::start(&["--model", "builtin", "--ranks", "3"]);
        let ranks = server.children();
        server.signal(signal);
        let (status, log) = server.wait(Duration::from_secs(30));
        assert_eq!(status.success(), is_clean, "signal {signal}: {log}");
        let deadline = Instant::now() + Duration::from_secs(3);
        for rank in ranks {
            while exists(rank) {
                assert!(Instant::now() < deadline, "rank {rank} outlives its server after signal {signal}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Whether it is alive, as its own endpoint says.
fn is_alive(server: &Server) -> bool {
    let mut stream = TcpStream::connect(server.url("")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.starts_with("HTTP/1.1 200")
}

#[test]
fn the_limit_of_open_files_is_logged_and_survived() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let dir = tempfile::tempdir().unwrap();
    let mut node = thunder(&["up", "--no-discovery", "--listen", "127.0.0.1:0", "--port", "0"]);
    node.env("THUNDER_DATA", dir.path().join("node")).stdout(std::process::Stdio::null());
    for server in [Server::start(&["--model", "builtin"]), Server::from(node)] {
        assert!(is_alive(&server));
        let open = std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count() as u64;
        let limit = Rlimit { current: Some(open + 8), maximum: Some(open + 8) };
        prlimit(Pid::from_raw(server.id()), Resource::Nofile, limit).unwrap();
        let clients: Vec<TcpStream> = (0..30).map(|_| TcpStream::connect(server.url("")).unwrap()).collect();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !server.log().contains("raise the limit of open files (ulimit -n)") {
            assert!(Instant::now() < deadline, "nothing is logged: {}", server.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(clients);
        assert!(is_alive(&server), "{}", server.log());
    }
}

#[test]
fn an_idle_engine_uses_no_processor() {
    let server = Server::start(&["--model", "builtin", "--ranks", "2"]);
    let processes: Vec<i32> = server.children().into_iter().chain([server.id()]).collect();
    let is_quiet = falls_quiet(&processes, Duration::from_secs(3), Duration::from_millis(60));
    assert!(is_quiet, "an idle server is never quiet");
}

#[test]
fn each_pinned_rank_has_its_own_core() {
    let status = |file: String, field: &str| {
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
        let value = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        value.trim().to_owned()
    };
    let allowed = status("/proc/self/status".into(), "Cpus_allowed_list:");
    let cores = std::thread::available_parallelism().unwrap().get();
    if cores < 2 {
        thunder_testing::skip("pinned_ranks_have_each_their_own_core", "the machine has one core");
        return;
    }
    let ranks = cores.to_string();
    for (options, pinned) in [(vec!["--pin"], true), (vec![], false)] {
        let all = [&["--model", "builtin", "--ranks", &ranks, "--threads", "1"], &options[..]].concat();
        let server = Server::start(&all);
        assert_eq!(
            post(&server.url("/v1/completions"), &json!({ "model": "builtin", "prompt": "a" })).0,
            200
        );
        let scheduler = std::fs::read_dir(format!("/proc/{}/task", server.id())).unwrap().find_map(|task| {
            let task = task.unwrap().path().display().to_string();
            (std::fs::read_to_string(format!("{task}/comm")).ok()?.trim() == "scheduler").then_some(task)
        });
        let others = server.children().into_iter().map(|process| format!("/proc/{process}"));
        let mut seen: Vec<String> = std::iter::once(scheduler.unwrap())
            .chain(others)
            .map(|task| status(format!("{task}/status"), "Cpus_allowed_list:"))
            .collect();
        let main = status(format!("/proc/{}/status", server.id()), "Cpus_allowed_list:");
        assert_eq!(main, allowed, "what does not compute is not bound");
        if pinned {
            assert!(seen.iter().all(|core| core.parse::<usize>().is_ok()), "one core each: {seen:?}");
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), cores, "each another: {seen:?}");
        } else {
            assert!(seen.iter().all(|cores| *cores == allowed), "{seen:?}");
        }
    }
}

/// A Llama whose matrices are Q2_K: 116 MB in the file, 138 MB in memory. The file is written at
/// once, so the system caches it in large pieces: reading its norms from a mapping once mapped half
/// of it.
fn two_bits(dir: &tempfile::TempDir) -> String {
    const HIDDEN: u64 = 1024;
    const CHANNELS: u64 = 2816;
    const LAYERS: u32 = 32;
    const F16: u32 = 1;
    const Q2_K: u32 = 10;
    // GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on.
    let mut others = (256u32..).filter_map(char::from_u32);
    let tokens: Vec<String> = (0u8..=255)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte).to_string(),
            _ => others.next().unwrap().to_string(),
        })
        .collect();
    let mut file = Gguf::default()
        .text("general.architecture", "llama")
        .number("llama.block_count", LAYERS)
        .number("llama.context_length", 4096)
        .number("llama.embedding_length", HIDDEN as u32)
        .number("llama.feed_forward_length", CHANNELS as u32)
        .number("llama.attention.head_count", 8)
        .number("llama.attention.head_count_kv", 1)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "gpt-2")
        .texts("tokenizer.ggml.tokens", &tokens)
        .texts::<&str>("tokenizer.ggml.merges", &[])
        .tensor("token_embd.weight", &[HIDDEN, 256], F16, [0, 0x3c].repeat(256 * HIDDEN as usize))
        .floats("output_norm.weight", &[HIDDEN], &[1.0; HIDDEN as usize]);
    // Scales, levels, and two factors in f16.
    let block =
        [vec![0x35; 16], (0..64u8).map(|level| level.wrapping_mul(37)).collect(), vec![0, 0x10, 0, 0x10]]
            .concat();
    for layer in 0..LAYERS {
        for (name, rows, columns) in [
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", HIDDEN / 8, HIDDEN),
            ("attn_v", HIDDEN / 8, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", CHANNELS, HIDDEN),
            ("ffn_up", CHANNELS, HIDDEN),
            ("ffn_down", HIDDEN, CHANNELS),
        ] {
            let blocks = block.repeat((rows * columns / 256) as usize);
            file = file.tensor(&format!("blk.{layer}.{name}.weight"), &[columns, rows], Q2_K, blocks);
        }
        for name in ["attn_norm", "ffn_norm"] {
            let name = format!("blk.{layer}.{name}.weight");
            file = file.floats(&name, &[HIDDEN], &[1.0; HIDDEN as usize]);
        }
    }
    let path = dir.path().join("two_bits.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_ranks_memory_is_its_shard_and_little_more() {
    let dir = tempfile::tempdir().unwrap();
    let folder = &synth(&dir, "model", "16");
    let small = &synth(&dir, "draft", "2");
    let two_bits = &two_bits(&dir);
    for (folder, ranks, draft) in [
        (folder, 1usize, None),
        (folder, 2, None),
        (folder, 3, None),
        (folder, 2, Some(small)),
        (two_bits, 1, None),
    ] {
        let count = ranks.to_string();
        let mut model = vec!["--model", folder, "--ranks", &count];
        model.extend(draft.iter().flat_map(|draft| ["--draft", draft]));
        let plan = run_json(&[&["plan", "--json"], &*model].concat());
        let options = ["--context", "512", "--max-batch", "1", "--threads", "1"];
        let server = Server::start(&[&*model, &options].concat());
        let body = json!({ "model": "default", "prompt": "abc", "max_tokens": 4 });
        assert_eq!(post(&server.url("/v1/completions"), &body).0, 200);
        let processes: Vec<i32> = std::iter::once(server.id()).chain(server.children()).collect();
        for (rank, process) in processes.iter().enumerate() {
            // The program's text and libraries are not the rank's: their size depends on the build.
            let peak = memory(*process, "VmHWM:") - memory(*process, "RssFile:");
            let share = plan["ranks"][rank]["weight_bytes"].as_u64().unwrap();
            println!("rank {rank} of {ranks}: peak {} MiB, weights {} MiB", peak >> 20, share >> 20);
            // Rank 0's peak includes its tokenizer of 128 thousand entries.
            let limit = share * 115 / 100 + (4 << 20);
            assert!(peak <= limit, "rank {rank} of {ranks}: {peak} bytes, {share} are weights");
        }
    }
}

/// Twelve such bodies once took 8 GB and left 4 GB.
#[test]
fn bodies_that_are_too_much_take_little_memory_and_give_it_back() {
    let server = Server::start(&["builtin", "--context", "2048"]);
    let mib = |field| memory(server.id(), field) >> 20;
    let before = mib("VmRSS:");
    let messages =
        json!({"model": "default", "messages": vec![json!({"role": "user", "content": ""}); 250_000]});
    let prompt = json!({"model": "default", "prompt": "word ".repeat(1_400_000)});
    std::thread::scope(|scope| {
        // Together below the limit of large bodies, at which a connection is closed early.
        for number in 0..8 {
            let (path, body) =
                if number < 4 { ("/v1/chat/completions", &messages) } else { ("/v1/completions", &prompt) };
            let url = server.url(path);
            scope.spawn(move || {
                let (status, answer) = post(&url, body);
                assert_eq!(status, 400, "{answer}");
            });
        }
    });
    let (most, after) = (mib("VmHWM:"), mib("VmRSS:"));
    assert!(most < before + 400, "{before} MiB before, {most} at most");
    assert!(after < before + 100, "{before} MiB before, {after} afterwards");
}

/// A web page whose own name leads to this machine gets nothing.
#[test]
fn a_server_is_found_by_name_and_refuses_other_names() {
    let server = Server::start(&["builtin", "--host", "localhost", "--allow-origin", "https://chat.example"]);
    let url = server.url("/health");
    let address = url.split('/').next().unwrap();
    let ask = |host: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        let origin = "Origin: https://chat.example\r\nConnection: close";
        write!(stream, "GET /health HTTP/1.1\r\nHost: {host}\r\n{origin}\r\n\r\n").unwrap();
        // `nc -N` ends its sending side with its input.
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    };
    let reply = ask("localhost");
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(reply.contains("access-control-allow-origin: https://chat.example"), "{reply}");
    assert!(ask("evil.example").starts_with("HTTP/1.1 403"));
}

/// The ids of the answers that a client got before the server died.
fn ask_until_it_dies(url: &str) -> Vec<String> {
    let body = json!({ "model": "builtin", "prompt": "The sea", "max_tokens": 2 });
    let whole = |answer: String| {
        let (head, body) = answer.split_once("\r\n\r\n")?;
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str::<Value>(body).ok()
    };
    let asked = std::iter::from_fn(|| exchange(url, &body).ok().and_then(whole));
    asked.map(|answer| answer["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_server_that_is_killed_under_load_has_a_record_of_every_answer() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store").to_str().unwrap().to_owned();
    let (mut answered, mut kills) = (BTreeSet::new(), 0);
    for kill in 0..runs(6, 100) {
        let server = Server::start(&["builtin", "--store", &store, "--context", "256", "--threads", "1"]);
        let url = server.url("/v1/completions");
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..4).map(|_| scope.spawn(|| ask_until_it_dies(&url))).collect();
            std::thread::sleep(Duration::from_millis(100 + kill as u64 * 37 % 200));
            server.signal(libc::SIGKILL);
            let ids: Vec<String> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
            kills += u64::from(!ids.is_empty());
            answered.extend(ids);
        });
    }
    assert!(kills > 0, "no server has answered before its end");
    let told = thunder(&["usage", "--requests", "--format", "jsonl", "--store", &store]).output().unwrap();
    let lines = String::from_utf8(told.stdout).unwrap();
    let records = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut counted: Vec<String> = records.map(|record| record["id"].as_str().unwrap().to_owned()).collect();
    let all = counted.len();
    counted.sort_unstable();
    counted.dedup();
    assert_eq!(counted.len(), all, "a request is counted twice");
    answered.retain(|id| counted.binary_search(id).is_err());
    assert!(answered.is_empty(), "{} of {all} answers are not counted: {answered:?}", answered.len());
}
