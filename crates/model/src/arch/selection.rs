//! Attention to selected tokens in config.json (DeepSeek V3.2, GLM-5).

use serde::Deserialize;
use serde_json::Value;

use crate::spec::SelectionShape;

/// The fields of config.json.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    index_topk: usize,
    index_head_dim: usize,
    index_n_heads: usize,
    /// Whether neighbouring columns of the indexer are rotated together; the family has a default.
    indexer_rope_interleave: Option<bool>,
    /// GLM-5: `full` for layers that select, `shared` for those that use the last selection.
    indexer_types: Option<Vec<String>>,
    /// The same as letters, F and S.
    index_topk_pattern: Option<String>,
    /// The same as a schedule: after the first layers, one layer in each run of this length
    /// selects.
    index_topk_freq: Option<usize>,
    index_skip_topk_offset: Option<usize>,
    /// GLM-5.3: tokens that become one key.
    #[serde(default = "one")]
    index_kpool: usize,
    #[serde(default = "yes")]
    index_kpool_always_select_tail: bool,
}

const fn one() -> usize {
    1
}
const fn yes() -> bool {
    true
}

/// GLM-5: layers that select before the schedule begins (transformers' GlmMoeDsaConfig).
const OFFSET: usize = 2;

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let config = Self::deserialize(text).map_err(|error| error.to_string())?;
        for (field, value, most) in [
            ("index_topk", config.index_topk, 1 << 20),
            ("index_head_dim", config.index_head_dim, 1 << 10),
            ("index_n_heads", config.index_n_heads, 1 << 12),
        ] {
            if value == 0 || value > most {
                return Err(format!("{field} is {value}: it must be between 1 and {most}"));
            }
        }
        if !config.index_head_dim.is_multiple_of(32) {
            return Err(format!("index_head_dim is {}: it must be a multiple of 32", config.index_head_dim));
        }
        let (pool, most) = (config.index_kpool, config.index_topk);
        if pool == 0
            || !(32usize.is_multiple_of(pool) || pool.is_multiple_of(32))
            || !most.is_multiple_of(pool)
        {
            return Err(format!(
                "index_kpool is {pool}: divisors and multiples of 32 that divide index_topk, {most}, are supported"
            ));
        }
        if !config.index_kpool_always_select_tail {
            return Err("index_kpool_always_select_tail is false: true is supported".into());
        }
        Ok(config)
    }

    /// Whether neighbouring columns of the indexer are rotated together.
    pub fn interleaved(&self, of_family: bool) -> bool {
        self.indexer_rope_interleave.unwrap_or(of_family)
    }

    /// Most tokens that a token attends to.
    pub const fn chosen(&self) -> usize {
        self.index_topk
    }

    /// How a layer selects; `rope` is the rotation of the indexer.
    pub fn shape(&self, layer: usize, rope: Option<usize>) -> Result<SelectionShape, String> {
        Ok(SelectionShape {
            heads: self.index_n_heads,
            dim: self.index_head_dim,
            chosen: self.index_topk,
            rope,
            pool: self.index_kpool,
            selects: self.selects(layer)?,
        })
    }

    fn selects(&self, layer: usize) -> Result<bool, String> {
        let kind = match (&self.indexer_types, &self.index_topk_pattern) {
            (Some(types), _) => types.get(layer).map(String::as_str),
            (None, Some(letters)) => letters.get(layer..layer + 1),
            (None, None) => {
                let every = self.index_topk_freq.unwrap_or(1).max(1);
                let offset = self.index_skip_topk_offset.unwrap_or(OFFSET);
                return Ok((layer + 1).saturating_sub(offset).is_multiple_of(every));
            }
        };
        match kind {
            Some("full" | "F") => Ok(true),
            Some("shared" | "S") if layer > 0 => Ok(false),
            other => Err(format!("the indexer of layer {layer} is {other:?}: full and shared are known")),
        }
    }
}
