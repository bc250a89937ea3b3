//! The processes of a group's ranks, as a test controls them.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::cables;
use crate::hosts::Hosts;

/// The environment variable that names what a rank's process does.
pub const WORK: &str = "COLLECTIVES_TEST_WORK";
/// Longer than anything that succeeds, even on a busy machine.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// What a group's processes have in common.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    pub size: usize,
    pub work: &'a str,
    /// As in `THUNDER_TRANSPORT`; for RDMA followed by the mode, as in `rdma uc`.
    pub transport: &'a str,
    pub stall_limit: Duration,
    /// Where the ranks run; `None`: all on this machine.
    pub hosts: Option<&'a Hosts>,
}

struct Rank {
    child: Child,
    lines: mpsc::Receiver<(Instant, String)>,
}

/// A group's processes. Dropping it kills those that still run.
pub struct Ranks {
    ranks: Vec<Rank>,
}

impl Ranks {
    /// Starts all ranks. They may not have found each other when this returns.
    pub fn start(setting: Setting<'_>) -> Self {
        let mut ranks = Self { ranks: vec![spawn(setting, 0, 0)] };
        let port = ranks.wait_for(0, "port").1[5..].parse().unwrap();
        ranks.ranks.extend((1..setting.size).map(|rank| spawn(setting, rank, port)));
        ranks
    }

    /// Like [`Self::start`], and waits until they work.
    pub fn start_ready(setting: Setting<'_>) -> Self {
        let mut ranks = Self::start(setting);
        for rank in 0..setting.size {
            ranks.wait_for(rank, "ready");
        }
        ranks
    }

    /// Replaces a process that has ended by a new one.
    pub fn replace(&mut self, setting: Setting<'_>, rank: usize, port: u16) {
        self.ranks[rank] = spawn(setting, rank, port);
    }

    /// Waits for a rank's next line and returns it with its time. Panics if it does not start with
    /// `word`.
    pub fn wait_for(&mut self, rank: usize, word: &str) -> (Instant, String) {
        match self.ranks[rank].lines.recv_timeout(WAIT_LIMIT) {
            Ok((came, line)) if line.starts_with(word) => (came, line),
            Ok((_, line)) => panic!("rank {rank}: {word:?} was expected, it says {line:?}"),
            Err(mpsc::RecvTimeoutError::Disconnected) => panic!("rank {rank} ended before it said {word:?}"),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("rank {rank} hangs: it never said {word:?}"),
        }
    }

    /// Waits for a rank's next line, whatever it is.
    pub fn next_line(&mut self, rank: usize) -> (Instant, String) {
        self.wait_for(rank, "")
    }

    /// Waits until a process has ended successfully.
    pub fn wait_for_end(&mut self, rank: usize) {
        let deadline = Instant::now() + WAIT_LIMIT;
        let status = loop {
            if let Some(status) = self.ranks[rank].child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "rank {rank}'s process does not end");
            std::thread::sleep(Duration::from_millis(2));
        };
        assert!(status.success(), "rank {rank} ended with {status}");
    }

    pub fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: the process is a child that has not been waited for, so its id is still its own.
        assert_eq!(unsafe { libc::kill(self.process(rank) as i32, signal) }, 0);
    }

    pub fn process(&self, rank: usize) -> u32 {
        self.ranks[rank].child.id()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // Most have ended; the others must not outlive the test.
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

fn spawn(setting: Setting<'_>, rank: usize, port: u16) -> Rank {
    let program = std::env::current_exe().unwrap();
    let (mut command, coordinator) = match setting.hosts {
        Some(hosts) => (hosts.command(rank, &program), Hosts::address(0)),
        None => (Command::new(program), "127.0.0.1".to_owned()),
    };
    let (transport, mode) = setting.transport.split_once(' ').unwrap_or((setting.transport, ""));
    if transport == "rdma" {
        let file = std::env::temp_dir().join(format!("thunder-cables-{}.json", std::process::id()));
        // Later ranks may be reading it.
        if rank == 0 {
            std::fs::write(&file, cables::device_file(setting.size)).unwrap();
        }
        command.env("THUNDER_RDMA_DEVICES", file).env("THUNDER_RDMA_MODE", mode);
    }
    let mut child = command
        .env(WORK, setting.work)
        .env("THUNDER_RANK", rank.to_string())
        .env("THUNDER_WORLD_SIZE", setting.size.to_string())
        .env("THUNDER_COORDINATOR", format!("{coordinator}:{port}"))
        .env("THUNDER_SECRET", "of these tests")
        .env("THUNDER_TRANSPORT", transport)
        .env("THUNDER_STALL_LIMIT_MS", setting.stall_limit.as_millis().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in output.lines() {
            // Fails if the test has ended.
            let _ = sender.send((Instant::now(), line.unwrap()));
        }
    });
    Rank { child, lines }
}
