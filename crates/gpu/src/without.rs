//! Switches parts off, to measure their effect.

use std::sync::OnceLock;

/// Parts that can be switched off. They change no result, unless stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// `ahead`: steps that are computed ahead.
    Ahead,
    /// `reports`: results that the host reads while the device goes on.
    Reports,
    /// `levels`: kernels that also store levels of their results.
    Levels,
    /// `whole`: attention of generated tokens in one kernel.
    Whole,
    /// `choose`: a norm, a router's product and its choice in one kernel.
    Choose,
    /// `relayed`: levels that relayed sums store.
    Relayed,
    /// `sums`: levels that sums over experts store.
    Sums,
    /// `prompts`: attention of prompts by matrices. Without it, results differ by rounding.
    Prompts,
    /// `pairs`: experts of prompts by matrices or in tiles. Without it, results differ by rounding.
    Pairs,
    /// `shared`: attention of all query heads together to compressed vectors. Without it, results
    /// differ by rounding.
    Shared,
    /// `held`: states of sequences that stay in registers while their rows are computed.
    Held,
    /// `bytes`: products of several rows by matrices of bytes.
    Bytes,
    /// `experts`: weights of experts that rows share, mostly generated tokens'.
    Experts,
    /// `unchecked`: compiling kernels of matrices without bounds checks.
    Unchecked,
}

const NAMES: [(&str, Way); 14] = [
    ("ahead", Way::Ahead),
    ("reports", Way::Reports),
    ("levels", Way::Levels),
    ("whole", Way::Whole),
    ("choose", Way::Choose),
    ("relayed", Way::Relayed),
    ("sums", Way::Sums),
    ("prompts", Way::Prompts),
    ("pairs", Way::Pairs),
    ("shared", Way::Shared),
    ("held", Way::Held),
    ("bytes", Way::Bytes),
    ("experts", Way::Experts),
    ("unchecked", Way::Unchecked),
];

/// Whether the environment variable `THUNDER_GPU_WITHOUT` names a part. It has names separated by
/// commas.
pub(crate) fn without(way: Way) -> bool {
    static OFF: OnceLock<Vec<Way>> = OnceLock::new();
    let off = OFF.get_or_init(|| {
        let names = std::env::var("THUNDER_GPU_WITHOUT").unwrap_or_default();
        let (off, unknown) = parts(&names);
        if !unknown.is_empty() {
            let known = NAMES.map(|(name, _)| name).join(", ");
            tracing::warn!("THUNDER_GPU_WITHOUT has no part called {}: use {known}", unknown.join(", "));
        }
        off
    });
    off.contains(&way)
}

/// The parts that a text names, and its words that name none.
fn parts(text: &str) -> (Vec<Way>, Vec<&str>) {
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    let (mut off, mut unknown) = (Vec::new(), Vec::new());
    for word in words {
        match NAMES.iter().find(|(name, _)| *name == word) {
            Some((_, way)) => off.push(*way),
            None => unknown.push(word),
        }
    }
    (off, unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_separated_by_commas_and_unknown_ones_are_found() {
        assert_eq!(parts(""), (vec![], vec![]));
        assert_eq!(parts("ahead, experts,"), (vec![Way::Ahead, Way::Experts], vec![]));
        assert_eq!(parts("expert,levels"), (vec![Way::Levels], vec!["expert"]));
    }
}
