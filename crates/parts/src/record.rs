//! The record of what is there of a file, next to it.
//!
//! A line for each piece that was fetched: its digest, or `-`, and its runs. A process that is
//! killed leaves a line that is cut short, which counts as none: the bytes are fetched again.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{Ranges, Run};

/// Bytes that were fetched together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The SHA-256 of its bytes in their order, hexadecimal, if it is known.
    pub digest: Option<String>,
    /// Where the bytes are.
    pub runs: Vec<Run>,
}

impl Piece {
    fn line(&self) -> String {
        let runs: Vec<String> = self.runs.iter().map(Run::to_string).collect();
        format!("{} {}\n", self.digest.as_deref().unwrap_or("-"), runs.join(" "))
    }

    /// The piece of a line without its end; `None` if it is none.
    fn parse(line: &str) -> Option<Self> {
        let (digest, runs) = line.split_once(' ')?;
        let runs: Vec<Run> = runs.split(' ').map(|run| run.parse().ok()).collect::<Option<_>>()?;
        Some(Self { digest: (digest != "-").then(|| digest.to_owned()), runs })
    }
}

/// What is there of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// The pieces, in the order in which they came.
    pub pieces: Vec<Piece>,
}

impl Record {
    /// Where the record of a file is.
    pub fn path_of(file: &Path) -> PathBuf {
        let mut name = OsString::from(file);
        name.push(".ranges");
        name.into()
    }

    /// Reads the record of a file, following a link to it; `None` if it has none: all of it is
    /// there.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of(file: &Path) -> io::Result<Option<Self>> {
        let Ok(file) = fs::canonicalize(file) else { return Ok(None) };
        match fs::read_to_string(Self::path_of(&file)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            text => Ok(Some(Self::parse(&text?))),
        }
    }

    fn parse(text: &str) -> Self {
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        Self { pieces: lines.filter_map(Piece::parse).collect() }
    }

    /// The bytes that are there.
    pub fn present(&self) -> Ranges {
        Ranges::of(self.pieces.iter().flat_map(|piece| &piece.runs))
    }

    /// Writes the record of a file anew.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write(&self, file: &Path) -> io::Result<()> {
        let path = Self::path_of(file);
        let mut temporary = OsString::from(&path);
        temporary.push(".new");
        let mut written = File::create(&temporary)?;
        written.write_all(self.pieces.iter().map(Piece::line).collect::<String>().as_bytes())?;
        written.sync_all()?;
        fs::rename(temporary, path)
    }

    /// Adds pieces to the record of a file, which exists. Their bytes must be on the disk.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn append(file: &Path, pieces: &[Piece]) -> io::Result<()> {
        let lines: String = pieces.iter().map(Piece::line).collect();
        OpenOptions::new().append(true).open(Self::path_of(file))?.write_all(lines.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_record_is_appended_to_and_a_line_cut_short_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights");
        fs::write(&file, "x").unwrap();
        assert_eq!(Record::of(&file).unwrap(), None);
        let header = Piece { digest: None, runs: vec![Run::of(0..100)] };
        let rows = Run { first: 200, len: 8, stride: 16, count: 3 };
        let second = Piece { digest: Some("ab".into()), runs: vec![Run::of(150..160), rows] };
        Record { pieces: vec![header.clone()] }.write(&file).unwrap();
        Record::append(&file, std::slice::from_ref(&second)).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let read = Record::of(&link).unwrap().unwrap();
        assert_eq!(read.pieces, [header.clone(), second]);
        assert_eq!(read.present().bytes(), 100 + 10 + 24);
        let text = fs::read_to_string(Record::path_of(&file)).unwrap();
        fs::write(Record::path_of(&file), &text[..text.len() - 2]).unwrap();
        assert_eq!(Record::of(&file).unwrap().unwrap().pieces, [header]);
    }
}
