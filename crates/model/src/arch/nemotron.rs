//! Nemotron-H in config.json: each layer is a state space (Mamba-2), attention, an MLP or experts.

use serde::Deserialize;
use serde_json::Value;

use crate::spec::StateSpaceShape;

/// The kind of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    StateSpace,
    Attention,
    Mlp,
    Experts,
}

/// The layers, and the shape of those with a state space.
#[derive(Debug)]
pub(super) struct Config {
    blocks: Vec<Block>,
    space: StateSpaceShape,
}

/// The fields of config.json, with the defaults of transformers' NemotronHConfig.
#[derive(Debug, Deserialize)]
struct Fields {
    hybrid_override_pattern: Option<Pattern>,
    layers_block_type: Option<Vec<String>>,
    layer_types: Option<Vec<String>>,
    mamba_num_heads: usize,
    mamba_head_dim: usize,
    #[serde(default = "groups")]
    n_groups: usize,
    #[serde(default = "state_dim")]
    ssm_state_size: usize,
    #[serde(default = "kernel")]
    conv_kernel: usize,
    #[serde(default = "yes")]
    use_conv_bias: bool,
    #[serde(default)]
    use_bias: bool,
    #[serde(default)]
    mamba_proj_bias: bool,
    mamba_hidden_act: Option<String>,
    mlp_hidden_act: Option<String>,
    time_step_limit: Option<[Limit; 2]>,
}

/// A letter for each layer, as one text or as a list.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Pattern {
    Text(String),
    List(Vec<String>),
}

/// A limit of time steps; the largest one is usually infinite, for which JSON has no number.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Limit {
    Number(f32),
    Named {
        #[serde(rename = "__float__")]
        name: String,
    },
}

impl Limit {
    fn value(&self) -> Result<f32, String> {
        match self {
            Self::Number(value) if value.is_finite() && *value >= 0.0 => Ok(*value),
            Self::Named { name } if name == "Infinity" => Ok(f32::INFINITY),
            other => Err(format!("time_step_limit has {other:?}: numbers from 0 on and Infinity are known")),
        }
    }
}

const fn groups() -> usize {
    8
}
const fn state_dim() -> usize {
    128
}
const fn kernel() -> usize {
    4
}
const fn yes() -> bool {
    true
}

/// Maximum layers, because lists of them are allocated before any weight is read.
pub(super) const MOST_LAYERS: usize = 1 << 12;

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let fields = Fields::deserialize(text).map_err(|error| error.to_string())?;
        for (field, value, most) in [
            ("mamba_num_heads", fields.mamba_num_heads, 1 << 14),
            ("mamba_head_dim", fields.mamba_head_dim, 1 << 12),
            ("n_groups", fields.n_groups, 1 << 14),
            ("ssm_state_size", fields.ssm_state_size, 1 << 10),
            ("conv_kernel", fields.conv_kernel, 64),
        ] {
            if value == 0 || value > most {
                return Err(format!("{field} is {value}: it must be between 1 and {most}"));
            }
        }
        let (heads, groups) = (fields.mamba_num_heads, fields.n_groups);
        if !heads.is_multiple_of(groups) {
            return Err(format!("mamba_num_heads is {heads}, no multiple of n_groups, {groups}"));
        }
        for (field, value, known) in [
            ("mamba_hidden_act", &fields.mamba_hidden_act, "silu"),
            ("mlp_hidden_act", &fields.mlp_hidden_act, "relu2"),
        ] {
            if let Some(other) = value.as_deref().filter(|value| *value != known) {
                return Err(format!("{field} is {other:?}: {known} is supported"));
            }
        }
        if fields.use_bias || fields.mamba_proj_bias {
            return Err("use_bias or mamba_proj_bias is true: projections of state spaces without biases \
                        are supported"
                .into());
        }
        let time_limit = match &fields.time_step_limit {
            Some([least, most]) => (least.value()?, most.value()?),
            None => (0.0, f32::INFINITY),
        };
        if time_limit.0 > time_limit.1 {
            return Err(format!("time_step_limit is {} to {}", time_limit.0, time_limit.1));
        }
        let space = StateSpaceShape {
            heads,
            head_dim: fields.mamba_head_dim,
            groups,
            state_dim: fields.ssm_state_size,
            kernel: fields.conv_kernel,
            conv_bias: fields.use_conv_bias,
            time_limit,
        };
        Ok(Self { blocks: fields.blocks()?, space })
    }

    /// True if a layer has experts.
    pub fn has_experts(&self) -> bool {
        self.blocks.contains(&Block::Experts)
    }

    /// The kind of layer number `layer`.
    pub fn block(&self, layer: usize) -> Result<Block, String> {
        let found = self.blocks.get(layer).copied();
        found.ok_or_else(|| format!("the pattern has {} layers: layer {layer} has none", self.blocks.len()))
    }

    /// The state space that a layer has in place of attention.
    pub fn for_attention(&self, layer: usize) -> Result<Option<StateSpaceShape>, String> {
        match self.block(layer)? {
            Block::StateSpace => Ok(Some(self.space)),
            Block::Attention => Ok(None),
            other @ (Block::Mlp | Block::Experts) => {
                Err(format!("layer {layer} is {other:?}: state spaces and attention are known here"))
            }
        }
    }

    /// The shape of state spaces.
    pub const fn space(&self) -> StateSpaceShape {
        self.space
    }
}

/// The config with the fields that the decoder's config needs: transformers 5 omits the number of
/// layers, and old files have another name for the width of heads.
pub(super) fn in_common_names(mut text: Value) -> Result<Value, String> {
    let blocks = Fields::deserialize(&text).map_err(|error| error.to_string())?.blocks()?;
    if let Some(fields) = text.as_object_mut() {
        // As transformers: the pattern counts.
        fields.insert("num_hidden_layers".into(), blocks.len().into());
        if let Some(width) = fields.get("attention_head_dim").cloned() {
            fields.entry("head_dim").or_insert(width);
        }
    }
    Ok(text)
}

impl Fields {
    fn blocks(&self) -> Result<Vec<Block>, String> {
        let of_name = |name: &String| match name.as_str() {
            "M" | "linear_attention" | "mamba" => Ok(Block::StateSpace),
            "*" | "full_attention" | "attention" => Ok(Block::Attention),
            "-" | "mlp" => Ok(Block::Mlp),
            "E" | "moe" => Ok(Block::Experts),
            other => Err(format!("the pattern of layers has {other:?}: M, *, - and E are known")),
        };
        let types = self.layers_block_type.as_ref().or(self.layer_types.as_ref());
        let blocks: Vec<Block> = match (types, &self.hybrid_override_pattern) {
            (Some(names), _) | (None, Some(Pattern::List(names))) => {
                names.iter().map(of_name).collect::<Result<_, _>>()?
            }
            (None, Some(Pattern::Text(letters))) => {
                letters.chars().map(|letter| of_name(&letter.to_string())).collect::<Result<_, _>>()?
            }
            (None, None) => return Err("it has no hybrid_override_pattern and no layers_block_type".into()),
        };
        match (1..=MOST_LAYERS).contains(&blocks.len()) {
            true => Ok(blocks),
            false => Err(format!(
                "the pattern of layers has {} of them: 1 to {MOST_LAYERS} are possible",
                blocks.len()
            )),
        }
    }
}
