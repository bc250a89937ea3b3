//! The code that a new node shows.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::base32;
use crate::id::NodeId;

/// Characters that identify the node that shows the code. They are public.
const SELECTOR_CHARACTERS: usize = 2;
/// Secret characters, with 5 bits each.
const SECRET_CHARACTERS: usize = 8;
/// Where a code has hyphens, for people.
const HYPHENS_AFTER: [usize; 2] = [2, 6];

/// A pairing code, such as `K7-4F9Q-X2MC`: two characters that identify the node, and eight secret
/// ones.
#[derive(Clone, PartialEq, Eq)]
pub struct Code {
    selector: String,
    secret: String,
}

/// Text that is not a code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a code: type the 10 letters and digits that `thunder up` shows on the new node, like K7-4F9Q-X2MC"
)]
pub struct BadCode(String);

impl Code {
    /// Creates the code of a node.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn draw(node: &NodeId) -> Result<Self, getrandom::Error> {
        let mut bytes = [0; SECRET_CHARACTERS * 5 / 8];
        getrandom::fill(&mut bytes)?;
        Ok(Self { selector: selector(node), secret: base32::encode(&bytes) })
    }

    /// Whether this may be the code of a node. One in 1,024 other nodes passes too.
    pub fn may_be_of(&self, node: &NodeId) -> bool {
        self.selector == selector(node)
    }

    /// The password of the key exchange.
    pub fn password(&self) -> &[u8] {
        self.secret.as_bytes()
    }
}

fn selector(node: &NodeId) -> String {
    let mut text = base32::encode(&Sha256::digest(node.0)[..2]);
    text.truncate(SELECTOR_CHARACTERS);
    text
}

impl FromStr for Code {
    type Err = BadCode;

    fn from_str(text: &str) -> Result<Self, BadCode> {
        let letters: String = text.chars().filter(|letter| !matches!(letter, '-' | ' ')).collect();
        let letters = base32::canonical(&letters);
        match letters.filter(|letters| letters.len() == SELECTOR_CHARACTERS + SECRET_CHARACTERS) {
            Some(letters) => {
                let (selector, secret) = letters.split_at(SELECTOR_CHARACTERS);
                Ok(Self { selector: selector.to_owned(), secret: secret.to_owned() })
            }
            None => Err(BadCode(text.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, letter) in self.selector.chars().chain(self.secret.chars()).enumerate() {
            let hyphen = if HYPHENS_AFTER.contains(&index) { "-" } else { "" };
            write!(formatter, "{hyphen}{letter}")?;
        }
        Ok(())
    }
}

/// Omits the secret, so that no log contains it.
impl fmt::Debug for Code {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Code({}-…)", self.selector)
    }
}

/// Attempts at a code that are answered at once.
const BURST: f64 = 5.0;
/// Attempts answered per second after that. An attacker on the network who tries for a day tests
/// 86,400 of 2⁴⁰ codes: one chance in 12 million.
const PER_SECOND: f64 = 1.0;

/// Limits how often a code may be tried. Further attempts are refused without checking them.
#[derive(Debug)]
pub struct Attempts {
    left: f64,
    counted_at: Duration,
}

impl Default for Attempts {
    fn default() -> Self {
        Self { left: BURST, counted_at: Duration::ZERO }
    }
}

impl Attempts {
    /// Whether an attempt may be answered now. If so, it is counted. `now` never decreases.
    pub fn take(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.counted_at).as_secs_f64();
        self.left = (self.left + passed * PER_SECOND).min(BURST);
        self.counted_at = now;
        let may = self.left >= 1.0;
        self.left -= if may { 1.0 } else { 0.0 };
        may
    }

    /// Returns an attempt that has succeeded.
    pub fn give_back(&mut self) {
        self.left = (self.left + 1.0).min(BURST);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_code_is_read_as_people_type_it() {
        let node = NodeId([7; 32]);
        let code = Code::draw(&node).unwrap();
        let shown = code.to_string();
        assert_eq!(shown.len(), 12, "{shown}");
        for typed in
            [shown.clone(), shown.to_ascii_lowercase(), shown.replace('-', ""), shown.replace('-', " ")]
        {
            assert_eq!(typed.parse::<Code>().unwrap(), code, "{typed}");
        }
        assert!(code.may_be_of(&node));
        assert!(!format!("{code:?}").contains(&shown[3..]));
        for wrong in ["", "K7-4F9Q", "K7-4F9Q-X2MCC", "K7-4F9Q-X2M!", "ü234567890"] {
            assert!(wrong.parse::<Code>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn two_draws_differ() {
        let node = NodeId([7; 32]);
        assert_ne!(Code::draw(&node).unwrap(), Code::draw(&node).unwrap());
    }

    #[test]
    fn attempts_are_limited() {
        let mut attempts = Attempts::default();
        let tried = |attempts: &mut Attempts, from: u64, to: u64| {
            (from..to).filter(|ms| attempts.take(Duration::from_millis(*ms))).count()
        };
        assert_eq!(tried(&mut attempts, 0, 500), 5);
        assert_eq!(tried(&mut attempts, 500, 60_500), 60);
        attempts.give_back();
        assert!(attempts.take(Duration::from_millis(60_500)));
        assert_eq!(tried(&mut attempts, 7_200_000, 7_200_010), 5);
    }
}
