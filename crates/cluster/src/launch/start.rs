//! Starts a planned rank: as a child of this process, or over `ssh`.

use std::path::Path;
use std::process::{Command, Stdio};

use super::plan::PlannedRank;
use super::{Launch, LaunchError, environment, remote};
use crate::ranks::{Feed, Pipe, RankProcess};

/// Starts a rank. The files of a local one are written to `folder`.
pub(super) fn start(plan: &PlannedRank, launch: &Launch, folder: &Path) -> Result<RankProcess, LaunchError> {
    if plan.local { start_local(plan, launch, folder) } else { start_remote(plan, launch) }
}

fn start_local(plan: &PlannedRank, launch: &Launch, folder: &Path) -> Result<RankProcess, LaunchError> {
    let mut command = Command::new(&plan.command[0]);
    command.args(&plan.command[1..]);
    for name in environment::OWN {
        command.env_remove(name);
    }
    command.envs(plan.environment.iter().map(|(name, value)| (name, value)));
    for (name, content) in &plan.files {
        let path = folder.join(name);
        std::fs::write(&path, content).map_err(LaunchError::system("write the ranks' files"))?;
        command.env(name, path);
    }
    if let Some(directory) = &plan.directory {
        if !directory.is_dir() {
            return Err(LaunchError::NoDirectory { rank: plan.rank, path: directory.clone() });
        }
        command.current_dir(directory);
    }
    let is_fed = launch.input.reaches(plan.rank);
    command.stdin(if is_fed { Stdio::piped() } else { Stdio::null() });
    let mut rank = spawn(command, plan)?;
    if let Some(pipe) = rank.take_input().map_err(LaunchError::system("open a rank's input"))? {
        rank.feed = Feed::Local(pipe);
    }
    Ok(rank)
}

fn start_remote(plan: &PlannedRank, launch: &Launch) -> Result<RankProcess, LaunchError> {
    let folder = remote::Folder::random()?;
    let words = remote::ssh_command(&launch.ssh, &plan.host, remote::BOOTSTRAP);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::piped());
    let mut rank = spawn(command, plan)?;
    let control: Option<Pipe> = rank.take_input().map_err(LaunchError::system("open the pipe to ssh"))?;
    if let Some(mut control) = control {
        control.push(remote::encode(&remote::script(plan, launch, &folder)).as_bytes());
        rank.control = Some(control);
    }
    if launch.input.reaches(plan.rank) {
        let command = remote::ssh_command(&launch.ssh, &plan.host, &folder.feed());
        rank.feed = Feed::Remote { command, connection: None };
    }
    Ok(rank)
}

fn spawn(mut command: Command, plan: &PlannedRank) -> Result<RankProcess, LaunchError> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let program = command.get_program().to_string_lossy().into_owned();
    RankProcess::spawn(command, plan.rank, plan.host.clone(), plan.local).map_err(|why| LaunchError::Start {
        rank: plan.rank,
        host: plan.host.clone(),
        program,
        why,
    })
}
