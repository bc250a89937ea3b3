//! The audit log: administrative acts, each with the hash of the one before.
//!
//! An entry is JSON text. Its hash is the SHA-256 of exactly that text, which contains the hash of
//! the previous entry. So a changed, removed or inserted entry breaks the chain. A person who can
//! write to the store can still remove the newest entries or rewrite the whole chain. Against that,
//! keep the latest hash in another place: exports, backups and the server's log have it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::secret::hex;
use crate::time::Time;

/// The first entry's value for the hash of the previous entry.
pub const FIRST_PREVIOUS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// The person or program that did an act, and the address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    /// `local`, or `key ID (NAME)`.
    pub name: String,
    /// Address of the client.
    pub remote: Option<String>,
}

impl Actor {
    /// The server's own user, on the server's machine.
    pub fn local() -> Self {
        Self { name: "local".into(), remote: None }
    }
}

/// An entry without its hash.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Ascending, without gaps, from 1.
    pub number: u64,
    /// The node of a cluster whose log this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// When it happened.
    pub time: Time,
    /// Who did it.
    pub actor: String,
    /// Address of the client.
    pub remote: Option<String>,
    /// What was done, like `key.create`.
    pub action: String,
    /// What it was done to.
    pub subject: Option<String>,
    /// Details. Contains no secrets.
    pub details: Value,
    /// Hash of the previous entry.
    pub previous: String,
}

/// An entry as stored: its text, and the hash of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// The entry as JSON.
    pub text: String,
    /// SHA-256 of the text.
    pub hash: String,
}

impl Sealed {
    /// Seals an entry.
    pub fn of(entry: &Entry) -> Self {
        // Strings and numbers always serialize.
        let text = serde_json::to_string(entry).unwrap_or_default();
        let hash = hash(&text);
        Self { text, hash }
    }

    /// The entry's JSON object with its hash as the last field.
    pub fn line(&self) -> String {
        let open = self.text.strip_suffix('}').unwrap_or(&self.text);
        format!("{open},\"hash\":\"{}\"}}", self.hash)
    }
}

/// SHA-256 of an entry's text.
pub fn hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// The place where a log differs from what was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("entry {number}: {why}")]
pub struct Broken {
    /// The first entry that is wrong.
    pub number: u64,
    /// What is wrong with it.
    pub why: &'static str,
}

/// Checks entries in order, one by one.
#[derive(Debug)]
pub struct Chain {
    /// Entries so far.
    pub entries: u64,
    /// Hash of the last one.
    pub head: String,
}

impl Default for Chain {
    fn default() -> Self {
        Self { entries: 0, head: FIRST_PREVIOUS.to_owned() }
    }
}

impl Chain {
    /// Takes the next entry.
    ///
    /// # Errors
    /// When it is not the one that followed, or was changed.
    pub fn check(&mut self, sealed: &Sealed) -> Result<(), Broken> {
        let number = self.entries + 1;
        let broken = |why| Broken { number, why };
        if hash(&sealed.text) != sealed.hash {
            return Err(broken("its text does not have its hash"));
        }
        let entry: Entry = serde_json::from_str(&sealed.text).map_err(|_| broken("its text is no entry"))?;
        if entry.number != number {
            return Err(broken("entries before it are missing"));
        }
        if entry.previous != self.head {
            return Err(broken("it does not follow the entry before it"));
        }
        (self.entries, self.head) = (number, sealed.hash.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> Vec<Sealed> {
        let mut chain = Chain::default();
        let entry = |number| {
            let entry = Entry {
                number,
                node: None,
                time: Time(number),
                actor: "local".into(),
                remote: None,
                action: "key.create".into(),
                subject: Some("k_1".into()),
                details: serde_json::json!({"cost": 0.1, "name": "ci"}),
                previous: chain.head.clone(),
            };
            let sealed = Sealed::of(&entry);
            chain.check(&sealed).unwrap();
            sealed
        };
        (1..=5).map(entry).collect()
    }

    fn check(log: &[Sealed]) -> Result<(), Broken> {
        let mut chain = Chain::default();
        log.iter().try_for_each(|sealed| chain.check(sealed))
    }

    #[test]
    fn every_change_breaks_the_chain() {
        assert_eq!(check(&log()), Ok(()));
        let mut removed = log();
        removed.remove(2);
        assert_eq!(check(&removed).unwrap_err().number, 3);
        let mut changed = log();
        changed[1].text = changed[1].text.replace("ci", "cd");
        assert_eq!(check(&changed).unwrap_err().number, 2);
        // If the entry's hash is changed too, the next entry does not match.
        changed[1].hash = hash(&changed[1].text);
        assert_eq!(check(&changed).unwrap_err().number, 3);
        let mut swapped = log();
        swapped.swap(0, 1);
        assert_eq!(check(&swapped).unwrap_err().number, 1);
    }

    #[test]
    fn an_exported_line_can_be_checked_with_sha256sum() {
        let sealed = &log()[0];
        let line: Value = serde_json::from_str(&sealed.line()).unwrap();
        assert_eq!(line["hash"], sealed.hash.as_str());
        let (text, _) =
            sealed.line().rsplit_once(",\"hash\"").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
        assert_eq!(hash(&format!("{text}}}")), sealed.hash);
    }
}
