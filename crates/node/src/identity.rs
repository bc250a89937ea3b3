//! A node's key pair, created when the node first starts.

use std::fmt;

use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};

use crate::id::NodeId;
use crate::storage::{DataFolder, StorageError};

/// The private key in a data folder, in PKCS #8.
pub(crate) const FILE: &str = "node.key";

/// A node's private key.
#[derive(Clone)]
pub struct Identity {
    id: NodeId,
    pkcs8: Vec<u8>,
}

/// Why a node has no key.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The data folder cannot be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The system gives no random numbers.
    #[error("the system gives no random numbers for a key")]
    NoRandom,
}

impl Identity {
    /// Creates a new key.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn generate() -> Result<Self, IdentityError> {
        let pkcs8 =
            Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| IdentityError::NoRandom)?;
        Self::parse(pkcs8.as_ref()).ok_or(IdentityError::NoRandom)
    }

    /// The key of a data folder; a new one if the folder has none.
    ///
    /// # Errors
    /// If the folder's key cannot be read or is damaged. A damaged key is never replaced, because
    /// the cluster knows this node by it.
    pub fn load_or_create(folder: &DataFolder) -> Result<Self, IdentityError> {
        if let Some(pkcs8) = folder.read(FILE)? {
            return Self::parse(&pkcs8).ok_or_else(|| {
                let why = "not an Ed25519 key; remove it to draw a new one and join again".to_owned();
                StorageError::Damaged { path: folder.file(FILE), why }.into()
            });
        }
        let identity = Self::generate()?;
        folder.write(FILE, &identity.pkcs8)?;
        Ok(identity)
    }

    /// Removes the key of a data folder. The next start creates a new one.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn forget(folder: &DataFolder) -> Result<(), StorageError> {
        folder.remove(FILE)
    }

    fn parse(pkcs8: &[u8]) -> Option<Self> {
        let pair = Ed25519KeyPair::from_pkcs8(pkcs8).ok()?;
        let id = NodeId(pair.public_key().as_ref().try_into().ok()?);
        Some(Self { id, pkcs8: pkcs8.to_vec() })
    }

    /// The public key.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// The private key in PKCS #8.
    pub(crate) fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }
}

/// Omits the private key, so that no log contains it.
impl fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Identity({})", self.id.short())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_key_stays_and_a_damaged_one_is_not_replaced() {
        let path = tempfile::tempdir().unwrap();
        let folder = DataFolder::open(path.path()).unwrap();
        let first = Identity::load_or_create(&folder).unwrap();
        assert_eq!(Identity::load_or_create(&folder).unwrap().id(), first.id());
        let text = format!("{first:?}");
        assert!(text.len() < 30, "{text}");
        let mut damaged = first.pkcs8().to_vec();
        damaged.truncate(40);
        folder.write(FILE, &damaged).unwrap();
        let error = Identity::load_or_create(&folder).unwrap_err().to_string();
        assert!(error.contains("node.key"), "{error}");
        Identity::forget(&folder).unwrap();
        assert_ne!(Identity::load_or_create(&folder).unwrap().id(), first.id());
    }
}
