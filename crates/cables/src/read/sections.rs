//! The sections of a transcript.

use std::collections::BTreeMap;

/// Maximum size of a transcript: a Mac with six ports prints 40 KiB.
const LONGEST_BYTES: usize = 4 << 20;

/// What each command of the probe printed, and its exit status.
#[derive(Debug, Clone, Default)]
pub struct Sections {
    found: BTreeMap<String, (i32, String)>,
    last: String,
}

impl Sections {
    /// Splits a transcript. Text before the first section (a greeting of ssh) is left out.
    pub fn split(transcript: &str) -> Self {
        let end = transcript.floor_char_boundary(LONGEST_BYTES);
        let mut sections = Self::default();
        for line in transcript[..end].lines() {
            let header = line.strip_prefix("@@ ").and_then(|rest| rest.rsplit_once(' '));
            if let Some((name, status)) = header.and_then(|(name, status)| Some((name, status.parse().ok()?)))
            {
                sections.last = name.to_owned();
                sections.found.insert(name.to_owned(), (status, String::new()));
            } else if let Some((_, text)) = sections.found.get_mut(&sections.last) {
                text.push_str(line.strip_prefix(" @@").map_or(line, |_| &line[1..]));
                text.push('\n');
            }
        }
        sections
    }

    /// The output of a command that succeeded.
    pub fn output(&self, name: &str) -> Option<&str> {
        self.found.get(name).filter(|(status, _)| *status == 0).map(|(_, text)| text.as_str())
    }

    /// The output of a command, whatever its status: `sysctl` fails if one of several names is
    /// unknown, and prints the others.
    pub fn partial(&self, name: &str) -> &str {
        self.found.get(name).map_or("", |(_, text)| text)
    }

    /// The exit status of a command; `None` if it was not run.
    pub fn status(&self, name: &str) -> Option<i32> {
        self.found.get(name).map(|(status, _)| *status)
    }

    /// The first line of a command's output.
    pub fn line(&self, name: &str) -> Option<&str> {
        self.output(name)?.lines().map(str::trim).find(|line| !line.is_empty())
    }

    /// The sections whose names begin with `prefix`, with the rest of the name.
    pub fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.found.iter().filter_map(move |(name, (status, text))| {
            name.strip_prefix(prefix).filter(|_| *status == 0).map(|rest| (rest, text.as_str()))
        })
    }

    /// The name of the last section.
    pub fn last(&self) -> &str {
        &self.last
    }

    /// Why a needed section is missing.
    pub fn why_missing(&self, name: &str, command: &str) -> String {
        match self.status(name) {
            None => format!("{command} was not run"),
            Some(127) => format!("{command} is not there"),
            Some(status) => format!("{command} failed with status {status}"),
        }
    }
}
