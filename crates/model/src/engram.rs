//! Data for layers with tables indexed by the last tokens, in addition to weights: tokens' numbers
//! before hashing, and random factors (engram, DeepSeek V4.1).

mod numbers;
mod pcg64;

pub(crate) use numbers::TokenNumbers;
#[cfg(test)]
pub(crate) use numbers::numbers;
pub(crate) use pcg64::Pcg64;
