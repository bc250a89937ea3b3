//! The checksum of a file, which is the etag that the hub sends.

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The hash in an etag.
pub(crate) enum Checksum {
    /// Large files: the SHA-256 of the content.
    Sha256(Sha256),
    /// Small files: git's hash of a blob.
    GitBlob(Sha1),
    /// An etag of another form, from another server. It is not a hash of the content.
    Unknown,
}

impl Checksum {
    /// The hash for this etag; `size` is the file's size in bytes.
    pub(crate) fn for_etag(etag: &str, size: u64) -> Self {
        let hexadecimal = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        match etag.len() {
            64 if hexadecimal => Self::Sha256(Sha256::new()),
            40 if hexadecimal => Self::GitBlob(Sha1::new_with_prefix(format!("blob {size}\0"))),
            _ => Self::Unknown,
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::GitBlob(hash) => hash.update(bytes),
            Self::Unknown => {}
        }
    }

    /// The hash's name and value; `None` if the etag is not a hash.
    pub(crate) fn finish(self) -> Option<(&'static str, String)> {
        match self {
            Self::Sha256(hash) => Some(("sha256", hex(&hash.finalize()))),
            Self::GitBlob(hash) => Some(("git blob hash", hex(&hash.finalize()))),
            Self::Unknown => None,
        }
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(etag: &str, content: &[u8]) -> Option<(&'static str, String)> {
        let mut checksum = Checksum::for_etag(etag, content.len() as u64);
        checksum.update(content);
        checksum.finish()
    }

    #[test]
    fn hashes_equal_those_of_git_and_sha256sum() {
        // `printf hello | git hash-object --stdin` and `printf hello | sha256sum`.
        let git = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
        assert_eq!(checksum(git, b"hello"), Some(("git blob hash", git.into())));
        let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        assert_eq!(checksum(sha256, b"hello"), Some(("sha256", sha256.into())));
        assert_eq!(checksum("some-etag", b"hello"), None);
    }
}
