//! What is left out to measure what it gives.

use std::sync::OnceLock;

/// Ways to be faster that change no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Steps that are computed ahead, named `ahead`.
    Ahead,
    /// Kernels that leave levels of their results, named `levels`.
    Levels,
    /// Attention of generated tokens in one kernel, named `whole`.
    Whole,
}

/// Whether the environment variable `THUNDER_GPU_WITHOUT` names a way: names with commas between.
pub(crate) fn without(way: Way) -> bool {
    static NAMES: OnceLock<String> = OnceLock::new();
    let names = NAMES.get_or_init(|| std::env::var("THUNDER_GPU_WITHOUT").unwrap_or_default());
    let name = match way {
        Way::Ahead => "ahead",
        Way::Levels => "levels",
        Way::Whole => "whole",
    };
    names.split(',').any(|word| word == name)
}
