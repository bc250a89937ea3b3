//! Keeps a Mac from sleeping while it serves.

use std::process::{Child, Command, Stdio};

/// macOS's program that holds a power assertion.
const PROGRAM: &str = "caffeinate";

/// A power assertion: the machine does not sleep while this lives, even if the display sleeps. It
/// ends with the process that made it, however that process ends.
#[derive(Debug)]
pub struct Awake(Child);

impl Awake {
    /// Makes the assertion on a Mac. `None` on other systems.
    ///
    /// # Errors
    /// When `caffeinate` cannot be started: the machine may then sleep while it serves.
    pub fn hold() -> Result<Option<Self>, String> {
        // A double of the program, in tests on other systems.
        if let Ok(double) = std::env::var("THUNDER_CAFFEINATE") {
            return Self::hold_with(&double).map(Some);
        }
        if cfg!(target_os = "macos") { Self::hold_with(PROGRAM).map(Some) } else { Ok(None) }
    }

    /// [`Awake::hold`] with a program of another path.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn hold_with(program: &str) -> Result<Self, String> {
        // -i: no idle sleep; -m: no disk sleep; -s: no system sleep on mains; -w: until this
        // process has ended.
        let process = std::process::id().to_string();
        let mut command = Command::new(program);
        command.args(["-i", "-m", "-s", "-w", &process]).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null()).spawn().map(Self).map_err(|error| {
            format!("{program}: {error}; this Mac may sleep while it serves (System Settings, Energy)")
        })
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        // Fails if it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
