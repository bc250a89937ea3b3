//! Everything that a launch will do, decided before anything is started.

use std::path::PathBuf;

use serde::Serialize;

use super::environment::{Variables, variables};
use super::hosts::is_local;
use super::secret;
use super::{Backend, Launch, LaunchError};

/// One rank, ready to be started.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedRank {
    /// The rank.
    pub rank: usize,
    /// Its host, as the user called it.
    pub host: String,
    /// Whether it runs as a child of this process.
    pub local: bool,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Working directory. `None`: the launcher's, if the host has it.
    pub directory: Option<PathBuf>,
    /// Variables.
    #[serde(serialize_with = "secret::serialize_masked")]
    pub environment: Vec<(String, String)>,
    /// Variables that name a file, with the file's content.
    pub files: Vec<(String, String)>,
}

/// Everything that a launch will do.
#[derive(Debug, Clone, Serialize)]
pub struct LaunchPlan {
    /// The ranks in order.
    pub ranks: Vec<PlannedRank>,
    /// The backend whose variables are set.
    pub backend: Backend,
    /// What the user should know.
    pub notes: Vec<String>,
    #[serde(skip)]
    pub(super) launch: Launch,
}

impl Launch {
    /// Places the ranks and decides their commands and variables. Starts nothing.
    ///
    /// # Errors
    /// When something that the ranks need is missing or contradictory.
    pub fn plan(&self) -> Result<LaunchPlan, LaunchError> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err(LaunchError::NoCommand);
        }
        let Variables { backend, ranks, notes } = variables(self)?;
        let command = self.full_command();
        let ranks = self
            .places
            .iter()
            .zip(ranks)
            .enumerate()
            .map(|(rank, (place, variables))| PlannedRank {
                rank,
                host: place.ssh.clone(),
                local: is_local(&place.ssh),
                command: command.clone(),
                directory: self.directory.clone(),
                environment: variables.environment,
                files: variables.files,
            })
            .collect();
        Ok(LaunchPlan { ranks, backend, notes, launch: self.clone() })
    }

    /// A `.py` command runs under the Python of the active environment, regardless of its first
    /// line.
    fn full_command(&self) -> Vec<String> {
        let script = self.command[0].ends_with(".py");
        let python = self.python.clone().or_else(|| script.then(active_python));
        python.into_iter().chain(self.command.iter().cloned()).collect()
    }
}

fn active_python() -> String {
    let environment = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().find_map(std::env::var_os);
    let program = environment.map(|folder| PathBuf::from(folder).join("bin/python"));
    let program =
        program.filter(|path| path.exists()).and_then(|path| path.into_os_string().into_string().ok());
    program.unwrap_or_else(|| "python3".to_owned())
}
