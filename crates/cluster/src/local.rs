//! Ranks on this machine: copies of this program, each told by its environment which rank it is.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thunder_collectives::{Config, InitError};

/// Ranks that were told to end have this long before they are killed.
const GRACE: Duration = Duration::from_secs(3);

/// Why ranks could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The system refused.
    #[error("cannot start the ranks of this machine: {0}")]
    System(#[from] io::Error),
    /// A setting is wrong.
    #[error(transparent)]
    Setting(#[from] InitError),
}

/// Where the ranks of this machine meet: a free port on loopback, and a secret of their own.
#[derive(Debug, Clone)]
pub struct LoopbackRendezvous {
    /// Bound listener for rank 0. It is bound before any rank starts, so that no other process can take its port.
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
    fn variables(&self, rank: usize, ranks: usize, transport: &str) -> [(&'static str, String); 8] {
        [
            ("THUNDER_RANK", rank.to_string()),
            ("THUNDER_WORLD_SIZE", ranks.to_string()),
            ("THUNDER_COORDINATOR", self.coordinator.clone()),
            ("THUNDER_SECRET", self.secret.clone()),
            ("THUNDER_TRANSPORT", transport.to_owned()),
            (LOCAL_RANKS, ranks.to_string()),
            (LOCAL_RANK, rank.to_string()),
            (CHILD, "1".to_owned()),
        ]
    }

    /// The configuration with which this process becomes rank 0 of `ranks`. `transport` is a value of `THUNDER_TRANSPORT`.
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

/// The other ranks of a group on this machine. Dropping it ends them.
#[derive(Debug)]
pub struct LocalRanks {
    children: Vec<Child>,
}

impl LocalRanks {
    /// Starts ranks 1 to `ranks - 1` as copies of this process with the same arguments. `transport` is a value of
    /// `THUNDER_TRANSPORT`.
    ///
    /// # Errors
    /// When a process cannot be started; those that were are ended.
    pub fn start(ranks: usize, rendezvous: &LoopbackRendezvous, transport: &str) -> Result<Self, StartError> {
        let program = std::env::current_exe()?;
        let mut started = Self { children: Vec::new() };
        for rank in 1..ranks {
            let mut command = Command::new(&program);
            command
                .args(std::env::args_os().skip(1))
                .envs(rendezvous.variables(rank, ranks, transport))
                .stdin(std::process::Stdio::null())
                .stdout(std::process::Stdio::null());
            // A Ctrl-C at the terminal is rank 0's to handle.
            #[cfg(unix)]
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            started.children.push(command.spawn()?);
        }
        Ok(started)
    }

    /// Waits for the ranks to end by themselves, and kills those that do not within a grace time.
    pub fn finish(&mut self) {
        let deadline = Instant::now() + GRACE;
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            // One that has ended by itself is only reaped by this.
            let _ = child.kill();
            let _ = child.wait();
        }
        self.children.clear();
    }
}

impl Drop for LocalRanks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Set for ranks that [`LocalRanks`] started, which run their parent's arguments.
pub const CHILD: &str = "THUNDER_CHILD";

/// How many ranks share this machine, set for ranks that [`LocalRanks`] starts.
pub const LOCAL_RANKS: &str = "THUNDER_LOCAL_RANKS";

/// Which of them a rank is, from 0 on.
pub const LOCAL_RANK: &str = "THUNDER_LOCAL_RANK";
