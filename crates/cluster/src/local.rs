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

/// The other ranks of a group on this machine. Dropping it ends them.
#[derive(Debug)]
pub struct LocalRanks {
    children: Vec<(usize, Child)>,
}

impl LocalRanks {
    /// Starts ranks 1 to `size - 1` as copies of this process with the same arguments, and returns the configuration with
    /// which this process becomes rank 0. `transport` is what `THUNDER_TRANSPORT` takes.
    ///
    /// # Errors
    /// When a process cannot be started; those that were are ended.
    pub fn start(size: usize, transport: &str) -> Result<(Config, Self), StartError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let coordinator = listener.local_addr()?.to_string();
        let mut bytes = [0u8; 32];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        let secret: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let variables = |rank: usize| {
            [
                ("THUNDER_RANK", rank.to_string()),
                ("THUNDER_WORLD_SIZE", size.to_string()),
                ("THUNDER_COORDINATOR", coordinator.clone()),
                ("THUNDER_SECRET", secret.clone()),
                ("THUNDER_TRANSPORT", transport.to_owned()),
                (LOCAL_RANKS, size.to_string()),
                (LOCAL_RANK, rank.to_string()),
                (CHILD, "1".to_owned()),
            ]
        };
        let own = variables(0);
        let lookup = |name: &str| match own.iter().find(|(key, _)| *key == name) {
            Some((_, value)) => Some(value.clone()),
            None => std::env::var(name).ok(),
        };
        let config = Config::from_variables(&lookup)?;
        let mut config = config.unwrap_or_else(|| Config::new(0, size, coordinator.clone()));
        config.listener = Some(Arc::new(listener));
        let program = std::env::current_exe()?;
        let mut ranks = Self { children: Vec::new() };
        for rank in 1..size {
            let mut command = Command::new(&program);
            command
                .args(std::env::args_os().skip(1))
                .envs(variables(rank))
                .stdin(std::process::Stdio::null())
                .stdout(std::process::Stdio::null());
            // A Ctrl-C at the terminal is rank 0's to handle.
            #[cfg(unix)]
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            ranks.children.push((rank, command.spawn()?));
        }
        Ok((config, ranks))
    }

    /// Waits for the ranks to end by themselves, and kills those that do not within a grace time.
    pub fn finish(&mut self) {
        let deadline = Instant::now() + GRACE;
        for (_, child) in &mut self.children {
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
        for (_, child) in &mut self.children {
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
