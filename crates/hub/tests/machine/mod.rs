//! Machines with caches, which are served over sockets of this process.

#![allow(dead_code, reason = "each test file uses a part of this")]

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use thunder_hub::{Peer, PeerStream, PullOptions, pull, serve};

use crate::server::{COMMIT, Server};

pub const FIRST: &str = "model-00001-of-00002.safetensors";

/// A machine with a cache. It dies for good once it has sent `life` bytes.
#[derive(Debug)]
pub struct Machine {
    pub name: &'static str,
    pub cache: tempfile::TempDir,
    life: Arc<AtomicUsize>,
    pub opened: AtomicUsize,
}

impl Machine {
    pub fn new(name: &'static str) -> Arc<Self> {
        let (life, opened) = (Arc::new(AtomicUsize::new(usize::MAX)), AtomicUsize::new(0));
        Arc::new(Self { name, cache: tempfile::tempdir().unwrap(), life, opened })
    }

    pub fn dies_after(&self, bytes: usize) {
        self.life.store(bytes, Ordering::Relaxed);
    }

    pub fn blob(&self, file: &str) -> std::path::PathBuf {
        fs::canonicalize(self.cache.path().join(format!("models--org--name/snapshots/{COMMIT}/{file}")))
            .unwrap()
    }
}

impl Peer for Machine {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn open(&self) -> io::Result<Box<dyn PeerStream>> {
        if self.life.load(Ordering::Relaxed) == 0 {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        self.opened.fetch_add(1, Ordering::Relaxed);
        let (near, mut far) = UnixStream::pair()?;
        let cache = self.cache.path().to_owned();
        thread::spawn(move || serve(&mut far, &cache, &()));
        Ok(Box::new(Line { stream: near, life: self.life.clone() }))
    }
}

#[derive(Debug)]
struct Line {
    stream: UnixStream,
    life: Arc<AtomicUsize>,
}

impl Read for Line {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.life.load(Ordering::Relaxed);
        if left == 0 {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let wanted = bytes.len().min(left);
        let count = self.stream.read(&mut bytes[..wanted])?;
        if left != usize::MAX {
            // Several connections share it.
            let rest = |life: usize| Some(life.saturating_sub(count));
            self.life.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).unwrap();
        }
        Ok(count)
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl PeerStream for Line {
    fn set_timeout(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(limit)
    }
}

pub fn options(server: &Server, cache: &Path, peers: &[&Arc<Machine>]) -> PullOptions {
    PullOptions {
        endpoint: server.endpoint.clone(),
        token: None,
        cache: cache.to_owned(),
        attempts: 3,
        first_wait: Duration::from_millis(5),
        peers: peers.iter().map(|peer| -> Arc<dyn Peer> { (*peer).clone() }).collect(),
        offline: false,
        refresh: false,
        ..PullOptions::from_env()
    }
}

/// A hub, and machines that have its model.
pub fn machines<const COUNT: usize>(names: [&'static str; COUNT]) -> (Server, [Arc<Machine>; COUNT]) {
    let server = Server::with_model();
    let machines = names.map(Machine::new);
    for machine in &machines {
        pull("org/name", "main", &options(&server, machine.cache.path(), &[]), &|_| {}).unwrap();
    }
    (server, machines)
}

/// A hub with one file that is large enough to come in pieces, and machines that have it.
pub fn machines_with_large<const COUNT: usize>(
    names: [&'static str; COUNT],
) -> (Server, [Arc<Machine>; COUNT]) {
    let server = Server::with_model();
    let (index, length) = (r#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#, 50_000_001);
    server.add("model.safetensors.index.json", index.into(), false);
    server.add(FIRST, thunder_testing::Random::new(5).bytes(length), true);
    let machines = names.map(Machine::new);
    for machine in &machines {
        pull("org/name", "main", &options(&server, machine.cache.path(), &[]), &|_| {}).unwrap();
    }
    (server, machines)
}
