//! Rotates the file to which a service manager writes standard error, if the manager does not
//! rotate it: launchd only appends.
//!
//! The file is copied, then truncated. It stays the same file, because the manager and the ranks
//! have it open.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags, fcntl_getfl, flock, fstat, ftruncate};

use crate::log;

/// Names the file.
pub const VARIABLE: &str = "THUNDER_LOG_FILE";
/// Size in bytes from which the file is rotated.
const LONGEST: u64 = 16 << 20;
/// Number of older files to keep: FILE.1 is the latest.
const KEPT: u32 = 4;
/// Interval between two checks of its length.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Rotates the file of [`VARIABLE`] from now on, if standard error goes there.
pub fn start() {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from) else {
        return;
    };
    let watched = Rotation::of(&path, io::stderr().as_fd()).and_then(|rotation| {
        let Some(rotation) = rotation else { return Ok(()) };
        std::thread::Builder::new().name("log".into()).spawn(move || rotation.keep()).map(drop)
    });
    if let Err(error) = watched {
        log::warn(format_args!("{VARIABLE}={}: the log is not rotated: {error}", path.display()));
    }
}

/// Only one process rotates a file: others that write to it find it locked.
struct Rotation {
    path: PathBuf,
    /// Another handle of the file. It holds the lock.
    file: File,
}

impl Rotation {
    /// `None` if `output` goes elsewhere, or another process rotates the file.
    fn of(path: &Path, output: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let file = File::options().read(true).write(true).open(path)?;
        let (own, its) = (fstat(output)?, fstat(&file)?);
        if (own.st_dev, own.st_ino) != (its.st_dev, its.st_ino) {
            return Ok(None);
        }
        if !fcntl_getfl(output)?.contains(OFlags::APPEND) {
            return Err(io::Error::other("it must be opened for appending (>>)"));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { path: path.to_owned(), file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn keep(mut self) {
        loop {
            // The next check may succeed; a disk error could not be written to the log anyway.
            let _ = self.rotate_at(LONGEST);
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Rotates a file of at least `longest` bytes.
    fn rotate_at(&mut self, longest: u64) -> io::Result<()> {
        if self.file.metadata()?.len() < longest {
            return Ok(());
        }
        for number in (1..KEPT).rev() {
            match std::fs::rename(self.numbered(number), self.numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let mut copy = File::create(self.numbered(1))?;
        copy.set_permissions(self.file.metadata()?.permissions())?;
        self.file.seek(SeekFrom::Start(0))?;
        io::copy(&mut self.file, &mut copy)?;
        // This process writes nothing during this time. Text that a rank writes in the last
        // microseconds is lost.
        let _quiet = io::stderr().lock();
        while io::copy(&mut self.file.by_ref().take(longest), &mut copy)? > 0 {}
        Ok(ftruncate(&self.file, 0)?)
    }

    fn numbered(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_long_file_is_copied_and_cut_and_the_writer_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("thunder.log");
        let mut writer = File::options().create(true).append(true).open(&path).unwrap();
        let mut rotation = Rotation::of(&path, writer.as_fd()).unwrap().unwrap();
        assert!(Rotation::of(&path, writer.as_fd()).unwrap().is_none(), "another one rotates it");
        let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap_or_default();
        for round in 0..7 {
            write!(writer, "round {round}").unwrap();
            rotation.rotate_at(100).unwrap();
            assert_eq!(text("thunder.log"), format!("round {round}"), "it is short");
            rotation.rotate_at(7).unwrap();
            assert_eq!((text("thunder.log").as_str(), text("thunder.log.1")), ("", format!("round {round}")));
        }
        assert_eq!((text("thunder.log.4").as_str(), text("thunder.log.5").as_str()), ("round 3", ""));
    }

    #[test]
    fn other_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("a"), folder.path().join("b"));
        let writer = File::options().create(true).append(true).open(&path).unwrap();
        File::create(&other).unwrap();
        assert!(Rotation::of(&other, writer.as_fd()).unwrap().is_none(), "the output goes elsewhere");
        // Truncation would leave a hole before the next text.
        let writer = File::options().write(true).open(&path).unwrap();
        assert!(Rotation::of(&path, writer.as_fd()).is_err_and(|error| error.to_string().contains("append")));
    }
}
