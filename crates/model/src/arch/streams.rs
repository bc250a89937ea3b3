//! Several residual streams in config.json (DeepSeek V4 and V4.1, GLM-5.3).

use serde::Deserialize;
use serde_json::Value;

use crate::spec::{StreamReading, StreamsShape};

/// The fields of config.json, with the defaults of transformers' classes.
#[derive(Debug, Deserialize)]
struct Fields {
    #[serde(default = "streams")]
    hc_mult: usize,
    #[serde(default = "iterations")]
    hc_sinkhorn_iters: usize,
    #[serde(default = "eps")]
    hc_eps: f32,
}

const fn streams() -> usize {
    4
}
const fn iterations() -> usize {
    20
}
const fn eps() -> f32 {
    1e-6
}

/// The residual streams.
pub(super) fn read(text: &Value, reading: StreamReading) -> Result<StreamsShape, String> {
    let Fields { hc_mult, hc_sinkhorn_iters, hc_eps } =
        Fields::deserialize(text).map_err(|error| error.to_string())?;
    for (field, value, range) in
        [("hc_mult", hc_mult, 2..=64), ("hc_sinkhorn_iters", hc_sinkhorn_iters, 1..=1 << 10)]
    {
        if !range.contains(&value) {
            let (least, most) = range.into_inner();
            return Err(format!("{field} is {value}: it must be between {least} and {most}"));
        }
    }
    match hc_eps.is_finite() && hc_eps >= 0.0 {
        true => Ok(StreamsShape { count: hc_mult, iterations: hc_sinkhorn_iters, eps: hc_eps, reading }),
        false => Err(format!("hc_eps is {hc_eps}: it must be a number from 0 on")),
    }
}
