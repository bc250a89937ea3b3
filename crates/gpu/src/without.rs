//! What is left out to measure what it gives.

use std::sync::OnceLock;

/// Ways to be faster. Those that say nothing else change no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Steps that are computed ahead, named `ahead`.
    Ahead,
    /// Kernels that leave levels of their results, named `levels`.
    Levels,
    /// Attention of generated tokens in one kernel, named `whole`.
    Whole,
    /// A norm, a router's product and its choice in one kernel, named `choose`.
    Choose,
    /// Levels that relayed sums leave, named `relayed`.
    Relayed,
    /// Levels that sums over experts leave, named `sums`.
    Sums,
    /// Attention of prompts by matrices, named `prompts`. Their results differ by rounding.
    Prompts,
    /// Experts of prompts by matrices, named `pairs`. Their results differ by rounding.
    Pairs,
    /// Kernels of matrices that are compiled without checks of bounds, named `unchecked`.
    Unchecked,
}

/// Whether the environment variable `THUNDER_GPU_WITHOUT` names a way: names with commas between.
pub(crate) fn without(way: Way) -> bool {
    static NAMES: OnceLock<String> = OnceLock::new();
    let names = NAMES.get_or_init(|| std::env::var("THUNDER_GPU_WITHOUT").unwrap_or_default());
    let name = match way {
        Way::Ahead => "ahead",
        Way::Levels => "levels",
        Way::Whole => "whole",
        Way::Choose => "choose",
        Way::Relayed => "relayed",
        Way::Sums => "sums",
        Way::Prompts => "prompts",
        Way::Pairs => "pairs",
        Way::Unchecked => "unchecked",
    };
    names.split(',').any(|word| word == name)
}
