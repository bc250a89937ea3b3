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

/// Whether the environment variable `THUNDER_GPU_WITHOUT` names a part. It has names separated by
/// commas.
pub(crate) fn without(way: Way) -> bool {
    static NAMES: OnceLock<String> = OnceLock::new();
    let names = NAMES.get_or_init(|| std::env::var("THUNDER_GPU_WITHOUT").unwrap_or_default());
    let name = match way {
        Way::Ahead => "ahead",
        Way::Reports => "reports",
        Way::Levels => "levels",
        Way::Whole => "whole",
        Way::Choose => "choose",
        Way::Relayed => "relayed",
        Way::Sums => "sums",
        Way::Prompts => "prompts",
        Way::Pairs => "pairs",
        Way::Shared => "shared",
        Way::Held => "held",
        Way::Bytes => "bytes",
        Way::Experts => "experts",
        Way::Unchecked => "unchecked",
    };
    names.split(',').any(|word| word == name)
}
