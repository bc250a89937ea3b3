//! Random numbers from the system.

use crate::error::{Error, Result};

/// A random number from the system's generator.
pub(crate) fn random_u32() -> Result<u32> {
    getrandom::u32().map_err(|source| Error::Handshake { reason: format!("no random number: {source}") })
}
