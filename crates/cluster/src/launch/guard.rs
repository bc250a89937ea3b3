//! Ends the local ranks if the launcher itself is killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use super::LaunchError;

/// Reads lists of process groups until `q` or the end of input. At the end of input it ends the
/// last list's groups.
const SCRIPT: &str = r#"IFS= read -r d; g=
while IFS= read -r l; do case $l in q) exit 0 ;; *) g=$l ;; esac; done
kill -s TERM -- $g; sleep "$1"; kill -s KILL -- $g; rm -rf -- "$d""#;

/// A `sh` process that outlives the launcher if the launcher is killed.
#[derive(Debug)]
pub(crate) struct Guard {
    process: Child,
    orders: Option<ChildStdin>,
}

impl Guard {
    /// `folder` holds the ranks' files. The guard removes it if the launcher is killed.
    pub fn start(folder: &Path, grace: Duration) -> Result<Self, LaunchError> {
        let mut process = Command::new("sh")
            .args(["-c", SCRIPT, "thunder-launch-guard", &grace.as_secs().max(1).to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(LaunchError::system("start sh"))?;
        let orders = process.stdin.take();
        let mut guard = Self { process, orders };
        guard.tell(&folder.to_string_lossy());
        Ok(guard)
    }

    /// Replaces the list of process groups to end.
    pub fn watch(&mut self, groups: &[i32]) {
        let list: Vec<String> = groups.iter().map(|group| format!("-{group}")).collect();
        self.tell(&list.join(" "));
    }

    fn tell(&mut self, line: &str) {
        if let Some(orders) = &mut self.orders {
            // Writing fails if the guard was killed. That matters only if the launcher is killed
            // too.
            let _ = orders.write_all(format!("{line}\n").as_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.tell("q");
        self.orders = None;
        let _ = self.process.wait();
    }
}
