//! What layers with tables by the last tokens need besides weights: tokens' numbers before they are
//! hashed, and random factors (engram, DeepSeek V4.1).

mod numbers;
mod pcg64;

pub(crate) use numbers::TokenNumbers;
#[cfg(test)]
pub(crate) use numbers::numbers;
pub(crate) use pcg64::Pcg64;
