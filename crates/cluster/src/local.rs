//! The other ranks of a group on this machine: copies of this program, which read from their
//! environment which rank they are.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use thunder_collectives::{Config, InitError};

use crate::ranks::{RankProcess, RankSet};

/// Time that ranks have to end by themselves before they are killed.
const GRACE: Duration = Duration::from_secs(3);

/// Time from the loss of a rank's connection until its process must have ended.
const NOTICE_LIMIT: Duration = Duration::from_secs(1);

/// Why the ranks of this machine could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A system call failed.
    #[error("cannot start the ranks of this machine: {0}")]
    System(#[from] io::Error),
    /// A `THUNDER_*` variable is wrong.
    #[error(transparent)]
    Setting(#[from] InitError),
}

/// Where the ranks of this machine meet: a free port on loopback, and a secret of their own.
#[derive(Debug, Clone)]
pub struct LoopbackRendezvous {
    /// Bound listener for rank 0. It is bound before any rank starts, so that no other process can
    /// take its port.
    pub listener: Arc<TcpListener>,
    /// The listener's address, `host:port`.
    pub coordinator: String,
    /// 256 random bits in hexadecimal.
    pub secret: String,
}

impl LoopbackRendezvous {
    /// Binds a free port and draws a secret.
    ///
    /// # Errors
    /// When the system refuses either.
    pub fn open() -> Result<Self, StartError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let coordinator = listener.local_addr()?.to_string();
        let mut bytes = [0u8; 32];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        let secret = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { listener: Arc::new(listener), coordinator, secret })
    }

    /// The variables from which a rank reads its group.
    fn variables(&self, rank: usize, ranks: usize, transport: &str) -> [(&'static str, String); 6] {
        [
            ("THUNDER_RANK", rank.to_string()),
            ("THUNDER_WORLD_SIZE", ranks.to_string()),
            ("THUNDER_COORDINATOR", self.coordinator.clone()),
            ("THUNDER_SECRET", self.secret.clone()),
            ("THUNDER_TRANSPORT", transport.to_owned()),
            (CHILD, "1".to_owned()),
        ]
    }

    /// The configuration with which this process becomes rank 0 of `ranks`. `transport` is a value
    /// of `THUNDER_TRANSPORT`.
    ///
    /// # Errors
    /// When one of this process's `THUNDER_*` variables is wrong.
    pub fn config(&self, ranks: usize, transport: &str) -> Result<Config, StartError> {
        let own = self.variables(0, ranks, transport);
        let config = Config::from_variables(&|name| match own.iter().find(|(key, _)| *key == name) {
            Some((_, value)) => Some(value.clone()),
            None => std::env::var(name).ok(),
        })?;
        let mut config = config.unwrap_or_else(|| Config::new(0, ranks, self.coordinator.clone()));
        config.listener = Some(self.listener.clone());
        Ok(config)
    }
}

/// The other ranks of a group on this machine. Dropping it kills them.
#[derive(Debug)]
pub struct LocalRanks {
    set: RankSet,
}

impl LocalRanks {
    /// Starts ranks 1 to `ranks - 1` as copies of this process with the same arguments. `transport`
    /// is a value of `THUNDER_TRANSPORT`.
    ///
    /// # Errors
    /// When a process cannot be started; those already started are killed.
    pub fn start(ranks: usize, rendezvous: &LoopbackRendezvous, transport: &str) -> Result<Self, StartError> {
        let program = std::env::current_exe()?;
        let mut set = RankSet::new(GRACE);
        for rank in 1..ranks {
            let mut command = Command::new(&program);
            command
                .args(std::env::args_os().skip(1))
                .envs(rendezvous.variables(rank, ranks, transport))
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            set.ranks.push(RankProcess::spawn(command, rank, "localhost".to_owned(), true)?);
        }
        Ok(Self { set })
    }

    /// Kills these ranks from another thread, such as a signal's.
    pub fn killer(&self) -> RankKiller {
        RankKiller { groups: self.set.guarded_groups() }
    }

    /// How a failed rank ended, as a message; if several failed, one that a signal has killed.
    /// Waits a moment for it, because the loss of a rank's connection is noticed before the end of
    /// its process.
    pub fn failure(&mut self) -> Option<String> {
        let deadline = Instant::now() + NOTICE_LIMIT;
        loop {
            let now = Instant::now();
            if let Some(rank) = self.set.reap(now) {
                return self.set.ranks.iter().find(|process| process.number == rank).map(RankProcess::words);
            }
            if now >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the ranks to end by themselves, and kills those that take longer than a grace
    /// time.
    pub fn finish(&mut self) {
        self.set.wait(Instant::now() + GRACE);
        // Dropping a rank that still runs kills it.
        self.set.ranks.clear();
    }
}

/// The process groups of [`LocalRanks`]. Must not be used after these were dropped: the system may
/// have given their numbers to others.
#[derive(Debug, Clone)]
pub struct RankKiller {
    groups: Vec<i32>,
}

impl RankKiller {
    /// Kills the ranks and what they started.
    pub fn kill(&self) {
        for group in self.groups.iter().filter_map(|group| Pid::from_raw(*group)) {
            // Fails if the group has ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Set for the ranks that [`LocalRanks`] starts, which run their parent's arguments.
pub const CHILD: &str = "THUNDER_CHILD";
