//! A plan as text for people: the commands that it would run.

use std::fmt;

use super::plan::LaunchPlan;
use super::shell::{join, quote};
use super::{remote, secret};

/// Shell commands of all ranks. Values that look like secrets are hidden.
impl fmt::Display for LaunchPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for rank in &self.ranks {
            let how = if rank.local { "" } else { "; the script goes over standard input, as one line" };
            writeln!(f, "# rank {} on {}{how}", rank.rank, rank.host)?;
            let mut shown = rank.clone();
            shown.environment = secret::masked(&rank.environment);
            if !rank.local {
                let ssh = remote::ssh_command(&self.launch.ssh, &rank.host, remote::BOOTSTRAP);
                writeln!(f, "{} <<'END'", join(&ssh))?;
                let folder = remote::Folder::example();
                writeln!(f, "{}END", remote::script(&shown, &self.launch, &folder))?;
                continue;
            }
            if let Some(directory) = &rank.directory {
                writeln!(f, "cd {}", quote(&directory.to_string_lossy()))?;
            }
            write!(f, "env")?;
            for (name, value) in &shown.environment {
                write!(f, " {name}={}", quote(value))?;
            }
            for (name, content) in &shown.files {
                write!(f, " {name}=<(echo {})", quote(content))?;
            }
            writeln!(f, " {}", join(&rank.command))?;
        }
        Ok(())
    }
}
