//! A program on a pseudo-terminal.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Loading and a few answers of the built-in model, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A program whose standard streams are a terminal. Killed when dropped.
pub struct Terminal {
    child: Child,
    near: File,
    shown: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Terminal {
    /// Starts a program on a terminal of this many columns.
    pub fn start(mut command: Command, columns: u16) -> Self {
        let near: OwnedFd = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&near).unwrap();
        unlockpt(&near).unwrap();
        tcsetwinsize(&near, Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let path = ptsname(&near, Vec::new()).unwrap();
        let far = File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlags::NOCTTY.bits() as i32)
            .open(OsStr::from_bytes(path.as_bytes()))
            .unwrap();
        command.stdin(far.try_clone().unwrap()).stdout(far.try_clone().unwrap()).stderr(far);
        let child = command.env("TERM", "xterm").spawn().unwrap();
        let near = File::from(near);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut from, to) = (near.try_clone().unwrap(), shown.clone());
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Fails when the program has ended.
            while let Ok(count) = from.read(&mut buffer)
                && count > 0
            {
                to.lock().unwrap().extend_from_slice(&buffer[..count]);
            }
        });
        Self { child, near, shown, reader }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// This end of the terminal.
    pub fn near(&self) -> &File {
        &self.near
    }

    /// All that the program has written.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.near.write_all(bytes).unwrap();
    }

    /// Waits until the program has written this text `count` times.
    pub fn wait_for(&self, text: &str, count: usize) {
        let deadline = Instant::now() + LIMIT;
        while self.shown().matches(text).count() < count {
            assert!(Instant::now() < deadline, "no {text:?} ({count} times) in {}", self.shown());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the program has ended.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                super::finish_reading(&self.reader);
                return status;
            }
            assert!(Instant::now() < deadline, "the program did not end: {}", self.shown());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
