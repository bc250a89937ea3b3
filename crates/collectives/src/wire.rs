//! The format in which the values of an all-reduce travel.

use serde::Serialize;

/// How the values of an all-reduce travel. All ranks of a group must use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// Unchanged.
    #[default]
    Exact,
    /// Sums of floats of 1 KiB and more travel as 8-bit levels with an `f32` scale per 64 values,
    /// unless all ranks share memory. That is a quarter of the bytes of `f32`, for wires slower
    /// than about 10 Gbit/s. The error of each rank's value is at most 1/254 of the largest value
    /// in its block; a sum that is done in parts is rounded the same way once more. The result has
    /// the same bits on all ranks.
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
