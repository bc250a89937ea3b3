//! How the values of an all-reduce travel.

use serde::Serialize;

/// How the values of an all-reduce travel. All ranks of a group must have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// As they are.
    #[default]
    Exact,
    /// Sums of floats of 1 KiB and more as 8-bit levels with an `f32` scale per 64 values, except where all ranks share
    /// memory: a quarter of the bytes of `f32`, for wires slower than some 10 Gbit/s. Each rank's value is off by at most
    /// 1/254 of the largest in its block, and so is the sum once more if it is done in parts. The result has the same bits on
    /// all ranks.
    Int8,
}

impl std::str::FromStr for Wire {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "exact" => Ok(Self::Exact),
            "int8" => Ok(Self::Int8),
            _ => Err(format!("unknown wire format {name:?}: use exact or int8")),
        }
    }
}
