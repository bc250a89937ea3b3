//! DeepSeek V4 in config.json: attention to compressed tokens, several residual streams.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::Rope;

use super::config;
use super::rope::{self, RopeParameters};
use crate::error::ModelError;
use crate::spec::{CompressedShape, CompressionShape, SelectionShape};

/// Index of the rotation of layers that compress no tokens.
pub(super) const MAIN_ROPE: usize = 0;
/// Index of the rotation of the others.
pub(super) const COMPRESS_ROPE: usize = 1;

/// How a layer attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// To a window.
    Window,
    /// To the window and to selected ones of tokens that overlap.
    Sparse,
    /// To the window and to all compressed tokens.
    Heavy,
}

/// The fields of config.json, with the defaults of transformers' DeepseekV4Config.
#[derive(Debug, Deserialize)]
struct Fields {
    head_dim: usize,
    q_lora_rank: usize,
    qk_rope_head_dim: Option<usize>,
    partial_rotary_factor: Option<f64>,
    sliding_window: usize,
    o_groups: usize,
    o_lora_rank: usize,
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    compress_rope_theta: Option<f64>,
    layer_types: Option<Vec<String>>,
    /// Tokens that become one, by the name of a layer's type.
    compress_rates: Option<BTreeMap<String, usize>>,
    compress_rate_csa: Option<usize>,
    compress_rate_hca: Option<usize>,
    /// The published files': tokens that become one, for each layer.
    compress_ratios: Option<Vec<usize>>,
}

const WINDOW: &str = "sliding_attention";
const SPARSE: &str = "compressed_sparse_attention";
const HEAVY: &str = "heavily_compressed_attention";

/// Attention and streams of a model.
#[derive(Debug)]
pub(super) struct Config {
    fields: Fields,
    kinds: Vec<Kind>,
    /// Tokens that become one, in sparse and in heavy layers.
    rates: [usize; 2],
    rotated: usize,
}

impl Config {
    pub fn read(text: &Value, layers: usize) -> Result<Self, String> {
        let fields = Fields::deserialize(text).map_err(|error| error.to_string())?;
        check_counts([
            fields.q_lora_rank,
            fields.sliding_window,
            fields.o_groups,
            fields.o_lora_rank,
            fields.index_n_heads,
            fields.index_head_dim,
            fields.index_topk,
        ])?;
        let partial = fields.partial_rotary_factor.unwrap_or(64.0 / 512.0);
        if !(partial > 0.0 && partial <= 1.0) {
            return Err(format!("partial_rotary_factor is {partial}: it must be above 0 and at most 1"));
        }
        let rotated = fields.qk_rope_head_dim.unwrap_or((fields.head_dim as f64 * partial) as usize);
        check_rotated(rotated, fields.head_dim.min(fields.index_head_dim))?;
        let rate = |kind: &str, old: Option<usize>, usual: usize| {
            let of_kind = fields.compress_rates.as_ref().and_then(|rates| rates.get(kind).copied());
            let rate = old.or(of_kind).unwrap_or(usual);
            match (1..=1 << 14).contains(&rate) {
                true => Ok(rate),
                false => {
                    Err(format!("compress_rates.{kind} is {rate}: it must be between 1 and {}", 1 << 14))
                }
            }
        };
        let rates = [rate(SPARSE, fields.compress_rate_csa, 4)?, rate(HEAVY, fields.compress_rate_hca, 128)?];
        let kinds = fields.kinds(layers)?;
        Ok(Self { fields, kinds, rates, rotated })
    }

    /// A layer's attention.
    pub fn shape(&self, layer: usize, config: &config::Config) -> Result<CompressedShape, String> {
        let Fields { head_dim, q_lora_rank, sliding_window, o_groups, o_lora_rank, .. } = self.fields;
        let heads = heads(config, o_groups)?;
        let kind = self.kinds[layer];
        let compression = match kind {
            Kind::Window => None,
            Kind::Heavy => Some(CompressionShape {
                every: self.rates[1],
                overlaps: false,
                selection: None,
                sources: None,
            }),
            Kind::Sparse => {
                let every = self.rates[0];
                // A context with fewer compressed tokens than a selection has is attended to whole.
                let selects = self.fields.index_topk < config.max_position_embeddings / every;
                let selection = SelectionShape {
                    heads: self.fields.index_n_heads,
                    dim: self.fields.index_head_dim,
                    chosen: self.fields.index_topk,
                    rope: Some(COMPRESS_ROPE),
                    pool: 1,
                    selects: true,
                };
                let selection = selects.then_some(selection);
                Some(CompressionShape { every, overlaps: true, selection, sources: None })
            }
        };
        Ok(CompressedShape {
            heads,
            dim: head_dim,
            rotated: self.rotated,
            query_rank: q_lora_rank,
            norm_eps: config.rms_norm_eps,
            query_norm: true,
            rounds: false,
            window: sliding_window,
            rope: if kind == Kind::Window { MAIN_ROPE } else { COMPRESS_ROPE },
            groups: o_groups,
            group_rank: o_lora_rank,
            compression,
        })
    }

    /// The rotations, in the order of [`MAIN_ROPE`] and [`COMPRESS_ROPE`].
    pub fn ropes(
        &self,
        config: &config::Config,
        malformed: &dyn Fn(String) -> ModelError,
    ) -> Result<Vec<Rope>, ModelError> {
        let theta = self.fields.compress_rope_theta.unwrap_or(160_000.0);
        ropes(config, Compression { rotated: self.rotated, theta }, malformed)
    }
}

/// Fields and their largest values.
const COUNTS: [(&str, usize); 7] = [
    ("q_lora_rank", 1 << 20),
    ("sliding_window", 1 << 20),
    ("o_groups", 1 << 12),
    ("o_lora_rank", 1 << 20),
    ("index_n_heads", 1 << 12),
    ("index_head_dim", 1 << 10),
    ("index_topk", 1 << 20),
];

/// Refuses values of [`COUNTS`] that are too small or too large.
pub(super) fn check_counts(values: [usize; 7]) -> Result<(), String> {
    match COUNTS.iter().zip(values).find(|((_, most), value)| *value == 0 || value > most) {
        None => Ok(()),
        Some(((field, most), value)) => Err(format!("{field} is {value}: it must be between 1 and {most}")),
    }
}

/// Refuses rotations of no column, or of all columns of the narrowest heads.
pub(super) fn check_rotated(rotated: usize, narrowest: usize) -> Result<(), String> {
    match (1..narrowest).contains(&rotated) {
        true => Ok(()),
        false => Err(format!(
            "qk_rope_head_dim is {rotated}: heads of {narrowest} columns must have others as well"
        )),
    }
}

/// The query heads, in `groups` groups for the output's projection. Refuses other kinds of
/// attention.
pub(super) fn heads(config: &config::Config, groups: usize) -> Result<usize, String> {
    if config.kv_heads() != 1 {
        return Err(format!("num_key_value_heads is {}: 1 is supported", config.kv_heads()));
    }
    if config.attention_bias == Some(true) {
        return Err("attention_bias is true: attention to compressed tokens has no biases here".into());
    }
    let heads = config.num_attention_heads;
    match heads.is_multiple_of(groups) {
        true => Ok(heads),
        false => Err(format!("num_attention_heads is {heads}, no multiple of o_groups, {groups}")),
    }
}

/// What rotations depend on, in addition to the fields that all families share.
pub(super) struct Compression {
    /// Columns that are rotated.
    pub rotated: usize,
    /// Base of layers that compress tokens.
    pub theta: f64,
}

/// The rotations, in the order of [`MAIN_ROPE`] and [`COMPRESS_ROPE`].
pub(super) fn ropes(
    config: &config::Config,
    compression: Compression,
    malformed: &dyn Fn(String) -> ModelError,
) -> Result<Vec<Rope>, ModelError> {
    let Compression { rotated, theta: compress_theta } = compression;
    let lengths = rope::Lengths { context: config.max_position_embeddings, original: None };
    let of = |theta: f64, scaling: Option<&RopeParameters>| match theta.is_finite() && theta > 1.0 {
        true => Ok(Rope { interleaved: true, ..rope::rope(theta, rotated, scaling, lengths)? }),
        false => Err(malformed(format!("a base of rotations is {theta}: it must be above 1"))),
    };
    let scaling = config.scaling();
    let set = |kind: &str| match scaling {
        Some(scaling) => scaling.of_layers(kind).map_err(malformed),
        None => Ok(None),
    };
    let main = set("main")?;
    let main_theta = main.as_ref().and_then(|set| set.rope_theta).or(config.rope_theta);
    let main = of(main_theta.unwrap_or(10_000.0), main.as_ref())?;
    let compress = match set("compress")? {
        Some(set) => of(set.rope_theta.unwrap_or(compress_theta), Some(&set))?,
        // The published files have one set, and YaRN without growth of attention.
        None => {
            let amplitude = scaling.and_then(RopeParameters::attention_factor).unwrap_or(1.0);
            Rope { amplitude: amplitude as f32, ..of(compress_theta, scaling)? }
        }
    };
    Ok(vec![main, compress])
}

impl Fields {
    fn kinds(&self, layers: usize) -> Result<Vec<Kind>, String> {
        let kinds: Vec<Kind> = match (&self.layer_types, &self.compress_ratios) {
            (Some(types), _) => {
                let kind = |name: &String| match name.as_str() {
                    WINDOW => Ok(Kind::Window),
                    SPARSE => Ok(Kind::Sparse),
                    HEAVY => Ok(Kind::Heavy),
                    other => {
                        Err(format!("layer_types has {other:?}: {WINDOW}, {SPARSE} and {HEAVY} are known"))
                    }
                };
                types.iter().map(kind).collect::<Result<_, _>>()?
            }
            (None, Some(ratios)) => {
                let kind = |ratio: &usize| match ratio {
                    0 => Ok(Kind::Window),
                    4 => Ok(Kind::Sparse),
                    128 => Ok(Kind::Heavy),
                    other => Err(format!("compress_ratios has {other}: 0, 4 and 128 are known")),
                };
                ratios.iter().map(kind).collect::<Result<_, _>>()?
            }
            (None, None) => {
                let kind =
                    |layer: usize| if layer > 2 && layer % 2 == 1 { Kind::Sparse } else { Kind::Heavy };
                (0..layers).map(kind).collect()
            }
        };
        // Some files have an entry for a layer that predicts further tokens.
        match kinds.len() >= layers {
            true => Ok(kinds),
            false => Err(format!("the types of layers have {} entries for {layers} layers", kinds.len())),
        }
    }
}
