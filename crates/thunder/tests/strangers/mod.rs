//! Somebody on the network who is in no cluster, at every port of a node that serves a model.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use thunder_testing::Random;

use crate::{Machine, Node, Switch, can_make_machines, three_nodes, wait};

/// Connections that say nothing, or stop in the middle.
const HALF_OPEN: usize = 1000;
/// Members are slower by this factor at most while strangers hold that many connections, and the
/// time in which a busy machine may answer late.
const SLOWER: u32 = 2;
const LATE: Duration = Duration::from_millis(200);
/// Time for a node to hang up on what is no message.
const HANGS_UP: Duration = Duration::from_secs(20);

/// TCP ports on which a machine's programs listen for other machines.
fn listening_ports(node: &Node) -> Vec<u16> {
    let script = "cat /proc/self/net/tcp /proc/self/net/tcp6";
    let output = node.machine.command(&["sh", "-c", script]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (address, port) = words.get(1)?.rsplit_once(':')?;
        // 0A is "listens"; 0100007F and 0…01000000 are loopback.
        let is_loopback = address.ends_with("0100007F") || address.ends_with("0000000001000000");
        (words.get(3) == Some(&"0A") && !is_loopback).then(|| u16::from_str_radix(port, 16).ok()).flatten()
    };
    let mut ports: Vec<u16> = text.lines().filter_map(port).collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// Runs on a machine's network.
fn on<T: Send>(machine: &Machine, work: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(format!("/proc/{}/ns/net", machine.id())).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            // SAFETY: moves this thread alone, which ends after the work.
            let moved = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
            work()
        });
        thread.join().unwrap()
    })
}

/// Sends bytes, and returns what is answered until the node hangs up; `None`: it does not.
fn answer(address: SocketAddr, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap();
    stream.set_read_timeout(Some(HANGS_UP)).unwrap();
    // The node may have hung up before all is written.
    drop(stream.write_all(bytes));
    let (mut said, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return Some(said),
            Ok(count) => said.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
            Err(_) => return Some(said),
        }
    }
}

/// Lets this process have as many connections as the test makes.
fn raise_open_files(wanted: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is written before the call returns.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_cur.max(wanted);
    limit.rlim_max = limit.rlim_max.max(wanted);
    // SAFETY: the limit is read before the call returns.
    let raised = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(raised, 0, "{}", std::io::Error::last_os_error());
}

/// The median time in which a member tells its status.
fn status_time(node: &Node) -> Duration {
    let mut times = [0; 5].map(|_| {
        let began = Instant::now();
        assert!(node.status().is_some());
        began.elapsed()
    });
    times.sort();
    times[2]
}

#[test]
fn strangers_at_every_port_are_refused_and_nothing_slows() {
    if !can_make_machines() {
        thunder_testing::skip("strangers_at_every_port_are_refused", "it needs root and namespaces");
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let nodes = three_nodes(&switch, "strangers", addresses);
    let stranger = Machine::new("dog").unwrap();
    switch.plug("dog", &stranger, &["10.9.0.9/24"]).unwrap();
    assert!(nodes[0].model(&["load", "builtin", "--nodes", "all", "--wait", "120"]).status.success());
    wait("three ranks", || nodes[1].ready_on().is_some_and(|ranks| ranks.len() == 3));
    let timed = || {
        let began = Instant::now();
        let text = nodes[1].complete(100);
        (text, began.elapsed())
    };
    let (text, _) = timed();
    let alone = (0..3).map(|_| timed().1).min().unwrap();
    let status_alone = status_time(&nodes[0]);
    let ports: Vec<Vec<u16>> = nodes.iter().map(listening_ports).collect();
    assert!(ports.iter().all(|ports| ports.contains(&7470)), "{ports:?}");
    println!("ports that listen for other machines: {ports:?}");
    let targets: Vec<SocketAddr> = (0..3)
        .flat_map(|index| {
            ports[index].iter().map(move |port| SocketAddr::from(([10, 9, 0, index as u8 + 1], *port)))
        })
        .collect();
    let mut random = Random::new(9);
    let garbage: Vec<Vec<u8>> = vec![
        random.bytes(100),
        random.bytes(70_000),
        vec![0; 4096],
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_vec(),
        // The greeting of a rank, and of TLS 1.0.
        b"thunder3thunder3".to_vec(),
        vec![22, 3, 1, 0, 4, 1, 0, 0, 0],
    ];
    on(&stranger, || {
        for (target, bytes) in
            targets.iter().flat_map(|target| garbage.iter().map(move |bytes| (target, bytes)))
        {
            let said = answer(*target, bytes);
            let said = said.unwrap_or_else(|| panic!("{target} keeps a stranger's connection open"));
            assert!(said.len() < 100, "{target} says {:?}", String::from_utf8_lossy(&said));
        }
    });
    raise_open_files((HALF_OPEN * targets.len()) as u64 + 1000);
    let (slowest, status_among) = std::thread::scope(|scope| {
        let (held, release) = std::sync::mpsc::channel::<()>();
        let (ready, opened) = std::sync::mpsc::channel();
        let (stranger, targets) = (&stranger, &targets);
        scope.spawn(move || {
            on(stranger, move || {
                let open = |index: usize| {
                    let target = targets[index % targets.len()];
                    let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5)).ok()?;
                    if index.is_multiple_of(2) {
                        drop(stream.write_all(&[22, 3, 1, 2, 0, 1]));
                    }
                    Some(stream)
                };
                let streams: Vec<_> = (0..HALF_OPEN * targets.len()).filter_map(open).collect();
                ready.send(streams.len()).unwrap();
                // Ends when the other end is dropped.
                let _ = release.recv();
            });
        });
        let count = opened.recv().unwrap();
        let answers: Vec<(String, Duration)> = (0..3).map(|_| timed()).collect();
        let status_among = status_time(&nodes[0]);
        drop(held);
        assert_eq!(count, HALF_OPEN * targets.len(), "half-open connections to {targets:?}");
        assert!(answers.iter().all(|(said, _)| *said == text), "the same answers");
        println!("{count} half-open connections were made, {HALF_OPEN} to each of {} ports", targets.len());
        (answers.iter().map(|(_, took)| *took).min().unwrap(), status_among)
    });
    println!("a member tells its status in {status_alone:?} alone, in {status_among:?} among strangers");
    let most = status_alone * SLOWER + LATE;
    assert!(status_among < most, "{status_alone:?} alone, {status_among:?} among strangers");
    println!("an answer takes {alone:?} alone, {slowest:?} among strangers");
    assert!(slowest < alone * SLOWER + LATE, "{alone:?} alone, {slowest:?} among strangers");
    assert!(nodes.iter().all(|node| node.reached() == crate::NAMES), "all nodes still reach all");
}
