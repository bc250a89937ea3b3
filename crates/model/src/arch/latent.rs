//! Latent attention in config.json (DeepSeek V2 and those after it).

use serde::Deserialize;
use serde_json::Value;

use super::config;
use super::family::Family;
use crate::spec::LatentShape;

/// The fields of config.json.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    #[serde(default = "interleaved")]
    rope_interleave: bool,
    /// Kimi Linear: nothing is rotated.
    #[serde(default)]
    mla_use_nope: bool,
    /// Kimi K3: heads' results are gated.
    #[serde(default)]
    mla_use_output_gate: bool,
}

fn interleaved() -> bool {
    true
}

/// A model's latent attention.
pub(super) struct Latent {
    pub shape: LatentShape,
    /// Columns that are rotated.
    pub rotated: usize,
    /// Neighbouring columns are rotated together.
    pub interleaved: bool,
}

/// Epsilon of the norms of compressed vectors, independent of `rms_norm_eps` (transformers'
/// DeepseekV3Attention).
const NORM_EPS: f32 = 1e-6;

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        Self::deserialize(text).map_err(|error| error.to_string())
    }

    pub fn shape(&self, config: &config::Config, family: &Family) -> Result<Latent, String> {
        let most = 1 << 20;
        for (field, value) in [
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ] {
            if value == 0 || value > most {
                return Err(format!("{field} is {value}: it must be between 1 and {most}"));
            }
        }
        let (rotated, least) = (self.qk_rope_head_dim, usize::from(!family.glm53));
        if rotated < least || rotated > most {
            return Err(format!("qk_rope_head_dim is {rotated}: it must be between {least} and {most}"));
        }
        if config.attention_bias == Some(true) {
            return Err("attention_bias is true: latent attention has no biases here".into());
        }
        // YaRN sharpens the scores (transformers' yarn_apply_mscale).
        let sharper = config.scaling().map_or(1.0, |scaling| scaling.latent_mscale());
        let width = (self.qk_nope_head_dim + self.qk_rope_head_dim) as f64;
        Ok(Latent {
            shape: LatentShape {
                heads: config.num_attention_heads,
                query_rank: self.q_lora_rank,
                rank: self.kv_lora_rank,
                plain: self.qk_nope_head_dim,
                rotated: self.qk_rope_head_dim,
                value_dim: self.v_head_dim,
                scale: (sharper * sharper / width.sqrt()) as f32,
                norm_eps: if family.glm53 { config.rms_norm_eps } else { NORM_EPS },
                rope: (!self.mla_use_nope && rotated > 0).then_some(0),
                temperature: None,
                selection: None,
                output_gate: self.mla_use_output_gate,
            },
            rotated: self.qk_rope_head_dim,
            interleaved: self.rope_interleave,
        })
    }
}
