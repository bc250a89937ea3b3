//! `thunder cluster start`: the agent in the background. And its end.

use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use thunder_cluster::watched::reason;
use thunder_node::agent::control::{self, ControlError, Request};
use thunder_node::storage::DataFolder;

/// Time for the agent to answer.
const START_LIMIT: Duration = Duration::from_secs(15);
/// Time for the agent to end after it was told to, with its ranks.
const END_LIMIT: Duration = Duration::from_secs(30);
/// The agent's output, in its data folder.
const LOG_FILE: &str = "agent.log";

#[derive(Args)]
pub struct StartArgs {
    /// Options for `thunder up`, after --, e.g. -- --join 10.0.0.1:7470
    #[arg(last = true, value_name = "OPTIONS")]
    options: Vec<String>,
}

impl StartArgs {
    /// Runs the command.
    pub async fn run(self, data: &Path) -> anyhow::Result<()> {
        match control::ask(data, &Request::Status).await {
            Ok(_) => {
                eprintln!("the agent runs already");
                return Ok(());
            }
            Err(silent @ ControlError::Silent { .. }) => return Err(silent.into()),
            Err(_) => {}
        }
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(data)
            .with_context(|| format!("cannot make {}", data.display()))?;
        let path = data.join(LOG_FILE);
        let log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
        command.arg("up").arg("--data").arg(data).args(&self.options);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C in this terminal is not for the agent.
        let mut agent = command.process_group(0).spawn().context("cannot start the agent")?;
        let began = Instant::now();
        while began.elapsed() < START_LIMIT {
            if control::ask(data, &Request::Status).await.is_ok() {
                eprintln!("the agent runs; what it says is in {}", path.display());
                return Ok(());
            }
            if let Some(status) = agent.try_wait()? {
                let said = std::fs::read_to_string(&path).unwrap_or_default();
                let why = reason(said.lines()).unwrap_or("it said nothing");
                let why = why.trim_start_matches("error: ");
                bail!("the agent ended with {status}: {why}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        bail!("the agent does not answer after {} s: see {}", START_LIMIT.as_secs(), path.display())
    }
}

/// Waits until the agent has ended, so that another one can start at once.
pub async fn await_end(data: &Path) -> anyhow::Result<()> {
    let began = Instant::now();
    while DataFolder::is_open(data) {
        if began.elapsed() > END_LIMIT {
            bail!("the agent was told to end, but has not after {} s", END_LIMIT.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
