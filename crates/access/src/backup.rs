//! A backup: the whole state of a data folder in one file of text.
//!
//! Lines of JSON: a header, then keys, limits, usage, sums and the audit log, and the folder's
//! other files (configuration, certificates). The last line has the hash of all lines before it, so
//! a truncated or changed file is refused before anything is restored.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use redb::ReadableTable;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::access::Access;
use crate::error::AccessError;
use crate::private;
use crate::secret::hex;
use crate::store::{AUDIT, FILE, HOURS, KEYS, META, RECORDS, Store};
use crate::time::Time;

/// The format that this version writes and reads.
const FORMAT: u64 = 1;
/// Other files of the data folder that belong to its state.
const FILES: [&str; 4] = ["config.toml", "node.toml", "tls-cert.pem", "tls-key.pem"];
/// Longer lines are damage.
const LONGEST_LINE_BYTES: u64 = 16 << 20;
/// Number of lines that one transaction restores.
const LINES_AT_ONCE: usize = 10_000;

/// The name of another file, and its content.
type OtherFile = (String, Vec<u8>);

/// A line of a backup.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Line {
    Thunder { format: u64, made: Time },
    Meta(String, String),
    Key(String, String),
    Record(u64, String),
    Hour(u64, String, String),
    Audit(u64, String, String),
    File(String, String),
    End { lines: u64, hash: String },
}

/// What a backup has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BackupReport {
    /// Keys.
    pub keys: u64,
    /// Usage records.
    pub records: u64,
    /// Entries of the audit log.
    pub audit: u64,
    /// Other files.
    pub files: u64,
    /// Its length.
    pub bytes: u64,
}

impl BackupReport {
    fn count(&mut self, line: &Line) {
        match line {
            Line::Key(..) => self.keys += 1,
            Line::Record(..) => self.records += 1,
            Line::Audit(..) => self.audit += 1,
            Line::File(..) => self.files += 1,
            _ => {}
        }
    }
}

struct Writer<W> {
    out: W,
    hash: Sha256,
    lines: u64,
    report: BackupReport,
}

impl<W: Write> Writer<W> {
    fn line(&mut self, line: &Line) -> std::io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.hash.update(&text);
        self.lines += 1;
        self.report.count(line);
        self.report.bytes += text.len() as u64;
        self.out.write_all(&text)
    }
}

impl Access {
    /// Writes the whole state to a new file that only its owner can read. The server keeps running:
    /// the backup shows the state at one moment.
    ///
    /// # Errors
    /// When the file exists, or the disk fails.
    pub fn backup(&self, path: &Path, now: Time) -> Result<BackupReport, AccessError> {
        self.move_records()?;
        let file = File::options().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|why| {
            let why = match why.kind() {
                ErrorKind::AlreadyExists => io::Error::new(
                    ErrorKind::AlreadyExists,
                    "it exists, and may be the only backup: name a new file, e.g. with the date",
                ),
                _ => why,
            };
            AccessError::system("make", path)(why)
        })?;
        let written = self.write_backup(&file, now).and_then(|report| {
            file.sync_all().map_err(AccessError::system("write", path))?;
            Ok(report)
        });
        if written.is_err() {
            // An incomplete backup must not look like a complete one.
            let _ = fs::remove_file(path);
        }
        written
    }

    fn write_backup(&self, file: &File, now: Time) -> Result<BackupReport, AccessError> {
        let out = BufWriter::new(file);
        let mut writer = Writer { out, hash: Sha256::new(), lines: 0, report: BackupReport::default() };
        let write = |writer: &mut Writer<_>, line: &Line| writer.line(line).map_err(redb_io);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let folder = self.folder().to_owned();
        self.store().read(|transaction| {
            write(&mut writer, &Line::Thunder { format: FORMAT, made: now })?;
            for entry in transaction.open_table(META)?.iter()? {
                let (name, value) = entry?;
                // Numbers are bytes, so all of them are written as base64.
                write(&mut writer, &Line::Meta(name.value().into(), STANDARD.encode(value.value())))?;
            }
            for entry in transaction.open_table(KEYS)?.iter()? {
                let (id, value) = entry?;
                write(&mut writer, &Line::Key(id.value().into(), text(value.value())))?;
            }
            for entry in transaction.open_table(RECORDS)?.iter()? {
                let (number, value) = entry?;
                write(&mut writer, &Line::Record(number.value(), text(value.value())))?;
            }
            for entry in transaction.open_table(HOURS)?.iter()? {
                let (key, value) = entry?;
                let (hour, dimensions) = key.value();
                write(&mut writer, &Line::Hour(hour, dimensions.into(), text(value.value())))?;
            }
            for entry in transaction.open_table(AUDIT)?.iter()? {
                let (number, value) = entry?;
                let (body, hash) = value.value();
                write(&mut writer, &Line::Audit(number.value(), body.into(), hash.into()))?;
            }
            for name in FILES {
                match fs::read(folder.join(name)) {
                    Ok(bytes) => write(&mut writer, &Line::File(name.into(), STANDARD.encode(bytes)))?,
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(error) => return Err(redb_io(error)),
                }
            }
            let end = Line::End { lines: writer.lines, hash: hex(&writer.hash.clone().finalize()) };
            write(&mut writer, &end)?;
            writer.out.flush().map_err(redb_io)?;
            Ok(writer.report)
        })
    }
}

fn redb_io(error: std::io::Error) -> redb::Error {
    redb::Error::Io(error)
}

/// The contents of a folder after a restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// What the backup has.
    pub report: BackupReport,
    /// Other files of the folder whose content was different.
    pub replaced: Vec<String>,
}

/// Restores a backup into a data folder that has no store. With `replace`, files with different
/// content, such as a configuration, are replaced.
///
/// # Errors
/// When the file is no whole backup, the folder has a store already, or would lose a file.
pub fn restore(backup: &Path, folder: &Path, replace: bool) -> Result<Restored, AccessError> {
    let (report, files) = check(backup)?;
    let existing = folder.join(FILE);
    if existing.exists() {
        let why = std::io::Error::other("it exists: move it away, or restore to another folder");
        return Err(AccessError::System { what: "restore over", path: existing, why });
    }
    let replaced = differing(&files, folder)?;
    if !replaced.is_empty() && !replace {
        let why = format!(
            "it has files that differ from the backup's ({}): move them away, or replace them by --force",
            replaced.join(", ")
        );
        return Err(AccessError::System {
            what: "restore to",
            path: folder.to_owned(),
            why: std::io::Error::other(why),
        });
    }
    // Under another name until it is complete.
    private::make_folder(folder).map_err(AccessError::system("make", folder))?;
    let partial = folder.join("restoring");
    if partial.exists() {
        fs::remove_dir_all(&partial).map_err(AccessError::system("remove", &partial))?;
    }
    let store = Store::open(&partial)?;
    files.iter().try_for_each(|(name, content)| write_file(&partial.join(name), content))?;
    let mut lines = Vec::new();
    for_each_line(backup, |_, line| {
        lines.push(line);
        if lines.len() < LINES_AT_ONCE { Ok(()) } else { put(&store, &std::mem::take(&mut lines)) }
    })?;
    put(&store, &lines)?;
    store.verify()?;
    drop(store);
    let entries = fs::read_dir(&partial).map_err(AccessError::system("read", &partial))?;
    for entry in entries {
        let entry = entry.map_err(AccessError::system("read", &partial))?;
        let to = folder.join(entry.file_name());
        fs::rename(entry.path(), &to).map_err(AccessError::system("write", &to))?;
    }
    fs::remove_dir(&partial).map_err(AccessError::system("remove", &partial))?;
    Ok(Restored { report, replaced })
}

/// Names of the backup's files that exist in the folder with different content.
fn differing(files: &[OtherFile], folder: &Path) -> Result<Vec<String>, AccessError> {
    let mut names = Vec::new();
    for (name, content) in files {
        let path = folder.join(name);
        match fs::read(&path) {
            Ok(there) if there != *content => names.push(name.clone()),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(AccessError::system("read", &path)(error)),
        }
    }
    Ok(names)
}

fn put(store: &Store, lines: &[Line]) -> Result<(), AccessError> {
    store.write(|transaction| {
        let mut meta = transaction.open_table(META)?;
        let mut keys = transaction.open_table(KEYS)?;
        let mut records = transaction.open_table(RECORDS)?;
        let mut hours = transaction.open_table(HOURS)?;
        let mut audit = transaction.open_table(AUDIT)?;
        for line in lines {
            match line {
                Line::Meta(name, value) => {
                    let value = STANDARD.decode(value).unwrap_or_default();
                    meta.insert(name.as_str(), value.as_slice())?;
                }
                Line::Key(id, value) => drop(keys.insert(id.as_str(), value.as_bytes())?),
                Line::Record(number, value) => drop(records.insert(number, value.as_bytes())?),
                Line::Hour(hour, dimensions, value) => {
                    hours.insert((*hour, dimensions.as_str()), value.as_bytes())?;
                }
                Line::Audit(number, body, hash) => {
                    audit.insert(number, (body.as_str(), hash.as_str()))?;
                }
                Line::Thunder { .. } | Line::File(..) | Line::End { .. } => {}
            }
        }
        Ok(())
    })
}

fn write_file(path: &Path, content: &[u8]) -> Result<(), AccessError> {
    let file = private::create_new(path, false);
    let written = file.and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()));
    written.map_err(AccessError::system("write", path))
}

/// Checks that a backup is complete. Returns its contents and its other files.
fn check(backup: &Path) -> Result<(BackupReport, Vec<OtherFile>), AccessError> {
    let bad = |why: &str| AccessError::BadBackup { path: backup.to_owned(), why: why.to_owned() };
    let (mut report, mut files) = (BackupReport::default(), Vec::new());
    let mut end = None;
    let mut lines = 0;
    let mut first = true;
    let mut hash = Sha256::new();
    for_each_line(backup, |text, line| {
        if end.is_some() {
            return Err(bad("lines follow its end"));
        }
        match (&line, std::mem::replace(&mut first, false)) {
            (Line::Thunder { format, .. }, true) if *format <= FORMAT => {}
            (Line::Thunder { format, .. }, true) => {
                return Err(bad(&format!("it has format {format}, this version reads up to {FORMAT}")));
            }
            (_, true) => return Err(bad("its first line is no backup's")),
            (Line::End { lines: count, hash: written }, false) => {
                end = Some(*count == lines && *written == hex(&hash.clone().finalize()));
            }
            (Line::File(name, _), false) if !FILES.contains(&name.as_str()) => {
                return Err(bad(&format!("it has a file \"{name}\", which is none of {}", FILES.join(", "))));
            }
            (Line::File(name, content), false) => {
                let content =
                    STANDARD.decode(content).map_err(|error| bad(&format!("the file {name}: {error}")))?;
                files.push((name.clone(), content));
            }
            _ => {}
        }
        hash.update(text);
        lines += 1;
        report.count(&line);
        report.bytes += text.len() as u64;
        Ok(())
    })?;
    match end {
        Some(true) => Ok((report, files)),
        Some(false) => Err(bad("its hash is not that of its lines: it was changed")),
        None => Err(bad("it has no end: it was cut off")),
    }
}

fn for_each_line(
    backup: &Path,
    mut take: impl FnMut(&[u8], Line) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    let file = File::open(backup).map_err(AccessError::system("read", backup))?;
    let mut reader = BufReader::new(file);
    let mut text = Vec::new();
    loop {
        text.clear();
        let read = reader.by_ref().take(LONGEST_LINE_BYTES).read_until(b'\n', &mut text);
        if read.map_err(AccessError::system("read", backup))? == 0 {
            return Ok(());
        }
        let line = serde_json::from_slice(&text).map_err(|error| AccessError::BadBackup {
            path: backup.to_owned(),
            why: format!("a line is no line of a backup: {error}"),
        })?;
        take(&text, line)?;
    }
}
