//! Ends the local ranks when the launcher itself is killed and can no longer do it.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use super::LaunchError;

/// It waits for its input to close; the last line before that is the list of groups, or `q` if all is well.
const SCRIPT: &str = r#"IFS= read -r d; g=
while IFS= read -r l; do case $l in q) exit 0 ;; *) g=$l ;; esac; done
kill -s TERM -- $g; sleep "$1"; kill -s KILL -- $g; rm -rf -- "$d""#;

/// A small process that outlives the launcher if need be.
pub(super) struct Guard {
    process: Child,
    orders: Option<ChildStdin>,
}

impl Guard {
    /// `folder` holds the ranks' files; it is removed with them.
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

    /// Names the process groups that are there now.
    pub fn watch(&mut self, groups: impl Iterator<Item = i32>) {
        let list: Vec<String> = groups.map(|group| format!("-{group}")).collect();
        self.tell(&list.join(" "));
    }

    fn tell(&mut self, line: &str) {
        if let Some(orders) = &mut self.orders {
            // A guard that someone has killed is missed only if the launcher is killed too.
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
