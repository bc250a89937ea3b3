//! A node's identifier in the protocol: its public key.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use crate::base32;

/// Characters of [`NodeId::short`].
const SHORT_CHARACTERS: usize = 8;

/// An Ed25519 public key. The holder of the private key is the node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 32]);

/// Text that is not a node's id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a node's id: 64 hexadecimal digits")]
pub struct BadNodeId(String);

impl NodeId {
    /// The first characters of the key's hash, for people. Two nodes may have the same.
    pub fn short(&self) -> String {
        let mut text = base32::encode(&Sha256::digest(self.0)[..5]);
        text.truncate(SHORT_CHARACTERS);
        text.to_ascii_lowercase()
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.short())
    }
}

impl FromStr for NodeId {
    type Err = BadNodeId;

    fn from_str(text: &str) -> Result<Self, BadNodeId> {
        let bad = || BadNodeId(text.chars().take(80).collect());
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(bad());
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|value| value as u8);
        let mut key = [0; 32];
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low).ok_or_else(bad)?;
        }
        Ok(Self(key))
    }
}

impl Serialize for NodeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NodeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn an_id_is_written_and_read_in_hexadecimal() {
        let id = NodeId(std::array::from_fn(|index| index as u8 * 7));
        assert_eq!(id.to_string().parse(), Ok(id));
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<NodeId>(&json).unwrap(), id);
        for wrong in ["", "00", &"g".repeat(64), &"é".repeat(32)] {
            assert!(wrong.parse::<NodeId>().is_err(), "{wrong}");
        }
    }
}
