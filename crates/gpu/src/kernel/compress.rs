//! WGSL of tokens that are compressed.

use super::Access;

/// Maximum width of a compressed token.
pub(crate) const MAX_COMPRESSED: usize = 1024;

/// Columns of a workgroup that keeps rows.
pub(crate) const KEPT: usize = 128;

/// One compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Compress {
    /// Computes compressed tokens.
    Means,
    /// Keeps the rows for later ones.
    Keep,
}

impl Compress {
    pub const ALL: [Self; 2] = [Self::Means, Self::Keep];

    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![
            Access::Read;
            match self {
                Self::Means => 7,
                Self::Keep => 4,
            }
        ];
        all.push(Access::Write);
        all
    }

    pub fn source(self) -> String {
        match self {
            Self::Means => {
                include_str!("compress/means.wgsl").replace("$COLUMNS", &MAX_COMPRESSED.to_string())
            }
            Self::Keep => include_str!("compress/keep.wgsl").to_owned(),
        }
    }
}
