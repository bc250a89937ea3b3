//! The tokens that follow a step's rows, found on the device.

use super::KEY;

/// Arguments of the kernels that look for the largest number among a row's parts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TokenSearch {
    /// Pairs of a column and a number for each row.
    pub parts: usize,
    /// Columns are stored as f32, because they were summed over ranks.
    pub are_floats: bool,
    /// The first word to write.
    pub to: usize,
    /// For ranks: their number, this rank, and the token of the first column.
    pub ranks: usize,
    pub rank: usize,
    pub first: u32,
}

impl TokenSearch {
    pub fn arguments(self) -> [u32; 6] {
        let Self { parts, are_floats, to, ranks, rank, first } = self;
        let [parts, to, ranks, rank] = [parts, to, ranks, rank].map(|number| number as u32);
        [parts, to, u32::from(are_floats), ranks, rank, first]
    }
}

/// The kernel that looks for the largest number among a row's parts, and then calls this function.
pub(super) fn next_tokens(end: &str) -> String {
    include_str!("next_tokens.wgsl").replace("$KEY", KEY).replace("$END", end)
}
