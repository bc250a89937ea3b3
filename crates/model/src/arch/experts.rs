//! Experts in config.json.

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::{Activation, ExpertGroups, Scores};

use crate::spec::{Correction, ExpertsShape, RouterShape, SharedShape};

/// Properties of a family's experts that its config does not contain.
#[derive(Clone, Copy)]
pub(super) struct ExpertFamily {
    scores: Scores,
    /// Unless the config has `norm_topk_prob`.
    renormalise: bool,
    correction: Correction,
    /// Number of experts in a group whose scores count for the group.
    best_of_group: usize,
    /// Gates are clamped (gpt-oss).
    clamped: bool,
    /// Routers and experts have biases.
    biased: bool,
    /// The weight of a token's only expert multiplies its input.
    weighs_input: bool,
    /// Experts have no gates.
    ungated: bool,
    /// Gates are limited (DeepSeek V4).
    limited: bool,
    /// Default number of layers whose experts a table gives, by token.
    assigned: usize,
    /// Stacks of unquantized experts are `[experts, inputs, outputs]` in Hugging Face's files.
    transposed: bool,
    /// `shared_expert_intermediate_size` is of a shared expert without a gate.
    plain_shared: bool,
}

/// Qwen and DeepSeek V2.
pub(super) const SOFTMAX: ExpertFamily = ExpertFamily {
    scores: Scores::Softmax,
    renormalise: false,
    correction: Correction::None,
    best_of_group: 1,
    clamped: false,
    biased: false,
    weighs_input: false,
    ungated: false,
    limited: false,
    assigned: 0,
    transposed: false,
    plain_shared: false,
};

/// Mixtral, Qwen3-Next, Qwen3.5.
pub(super) const RENORMALISED_SOFTMAX: ExpertFamily = ExpertFamily { renormalise: true, ..SOFTMAX };

/// ERNIE 4.5.
pub(super) const ERNIE: ExpertFamily =
    ExpertFamily { correction: Correction::IfGiven, ..RENORMALISED_SOFTMAX };

/// gpt-oss.
pub(super) const GPT_OSS: ExpertFamily =
    ExpertFamily { clamped: true, biased: true, transposed: true, ..RENORMALISED_SOFTMAX };

/// Qwen3-VL.
pub(super) const TRANSPOSED: ExpertFamily = ExpertFamily { transposed: true, ..RENORMALISED_SOFTMAX };

/// Mistral 4: the two best experts of a group count for it.
pub(super) const MISTRAL: ExpertFamily = ExpertFamily { best_of_group: 2, ..RENORMALISED_SOFTMAX };

/// Llama 4.
pub(super) const LLAMA4: ExpertFamily =
    ExpertFamily { scores: Scores::Sigmoid, weighs_input: true, transposed: true, ..SOFTMAX };

/// Steepness of gpt-oss's gates, which its configs do not contain (transformers' GptOssExperts).
const GPT_OSS_ALPHA: f32 = 1.702;

/// DeepSeek V3 and those after it.
pub(super) const SIGMOID_CORRECTED: ExpertFamily = ExpertFamily {
    scores: Scores::Sigmoid,
    renormalise: true,
    correction: Correction::Given,
    best_of_group: 2,
    ..SOFTMAX
};

/// MiniMax M3.
pub(super) const MINIMAX3: ExpertFamily = ExpertFamily { clamped: true, ..SIGMOID_CORRECTED };

/// DeepSeek V4.
pub(super) const DEEPSEEK4: ExpertFamily = ExpertFamily {
    scores: Scores::RootSoftplus,
    limited: true,
    assigned: 3,
    best_of_group: 1,
    ..SIGMOID_CORRECTED
};

/// DeepSeek V4.1.
pub(super) const DEEPSEEK41: ExpertFamily = ExpertFamily { assigned: 0, ..DEEPSEEK4 };

/// GLM-5.3.
pub(super) const GLM5_3: ExpertFamily = ExpertFamily { limited: true, ..SIGMOID_CORRECTED };

/// Nemotron-H.
pub(super) const NEMOTRON: ExpertFamily = ExpertFamily { ungated: true, ..SIGMOID_CORRECTED };

/// Flint.
pub(super) const FLINT: ExpertFamily =
    ExpertFamily { scores: Scores::Sigmoid, plain_shared: true, ..RENORMALISED_SOFTMAX };

/// Maximum experts of a layer, because lists of them are allocated before any weight is read.
const MOST_EXPERTS: usize = 1 << 12;

/// The fields of config.json, under the names of all families.
#[derive(Debug, Deserialize)]
struct Fields {
    num_experts: Option<usize>,
    num_local_experts: Option<usize>,
    n_routed_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    /// Gemma 4's name of it.
    top_k_experts: Option<usize>,
    /// One number for each layer in Hunyuan's files.
    moe_intermediate_size: Option<OneOrMany>,
    n_shared_experts: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    /// Hunyuan 3 has another name.
    #[serde(alias = "router_scaling_factor")]
    routed_scaling_factor: Option<f32>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    topk_method: Option<String>,
    scoring_func: Option<String>,
    first_k_dense_replace: Option<usize>,
    moe_layer_freq: Option<usize>,
    decoder_sparse_step: Option<usize>,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    mlp_layer_types: Option<Vec<String>>,
    /// DeepSeek V4: layers whose experts a table gives.
    num_hash_layers: Option<usize>,
    swiglu_limit: Option<f32>,
    swiglu_alpha: Option<f32>,
    /// Nemotron-H: channels of the shared expert, which may differ from those of the others.
    moe_shared_expert_intermediate_size: Option<usize>,
    /// Granite's name of it. Some configs without a shared expert have 0.
    shared_intermediate_size: Option<usize>,
    /// Nemotron-H: width of what routed experts read and write.
    moe_latent_size: Option<usize>,
    /// Kimi K3's name of it, and whether the experts' sum is normed.
    routed_expert_hidden_size: Option<usize>,
    #[serde(default)]
    latent_moe_use_norm: bool,
    mlp_bias: Option<bool>,
    /// ERNIE's names.
    moe_num_experts: Option<usize>,
    moe_k: Option<usize>,
    /// Hunyuan's names; one number for each layer in some files.
    moe_topk: Option<OneOrMany>,
    num_shared_expert: Option<OneOrMany>,
    /// Kimi Linear's names.
    num_experts_per_token: Option<usize>,
    num_shared_experts: Option<usize>,
    num_expert_group: Option<usize>,
    moe_renormalize: Option<bool>,
    moe_router_activation_func: Option<String>,
    /// Llama 4: the layers that have experts, or the length of runs in which the last layer has
    /// them.
    moe_layers: Option<Vec<usize>>,
    interleave_moe_layer_step: Option<usize>,
    moe_num_shared_experts: Option<usize>,
    moe_layer_start_index: Option<usize>,
    /// -1: the last layer.
    moe_layer_end_index: Option<i64>,
    moe_layer_interval: Option<usize>,
    moe_gate_act: Option<String>,
    use_bias: Option<bool>,
}

/// A number for all layers, or one for each.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(usize),
    Many(Vec<usize>),
}

/// The number of `field`, which must be the same for all layers.
fn same(numbers: Option<&OneOrMany>, field: &str) -> Result<Option<usize>, String> {
    match numbers {
        None => Ok(None),
        Some(OneOrMany::One(one)) => Ok(Some(*one)),
        Some(OneOrMany::Many(many)) => match many.split_first() {
            Some((first, rest)) if rest.iter().all(|number| number == first) => Ok(Some(*first)),
            _ => Err(format!("{field} is {many:?}: the same number for all layers is supported")),
        },
    }
}

impl Fields {
    /// ERNIE's names as the others'.
    fn in_common_names(self) -> Result<Self, String> {
        let chosen = same(self.moe_topk.as_ref(), "moe_topk")?;
        let shared = same(self.num_shared_expert.as_ref(), "num_shared_expert")?;
        Ok(Self {
            num_experts: self.num_experts.or(self.moe_num_experts),
            num_experts_per_tok: self
                .num_experts_per_tok
                .or(self.moe_k)
                .or(self.num_experts_per_token)
                .or(self.top_k_experts)
                .or(chosen),
            n_shared_experts: self
                .n_shared_experts
                .or(self.moe_num_shared_experts)
                .or(self.num_shared_experts)
                .or(shared),
            moe_shared_expert_intermediate_size: self
                .moe_shared_expert_intermediate_size
                .or(self.shared_intermediate_size.filter(|channels| *channels > 0)),
            moe_latent_size: self.moe_latent_size.or(self.routed_expert_hidden_size),
            n_group: self.n_group.or(self.num_expert_group),
            norm_topk_prob: self.norm_topk_prob.or(self.moe_renormalize),
            first_k_dense_replace: self.first_k_dense_replace.or(self.moe_layer_start_index),
            decoder_sparse_step: self
                .decoder_sparse_step
                .or(self.moe_layer_interval)
                .or(self.interleave_moe_layer_step),
            scoring_func: self.scoring_func.or(self.moe_gate_act).or(self.moe_router_activation_func),
            moe_router_activation_func: None,
            moe_gate_act: None,
            ..self
        })
    }
}

/// The experts of a model.
pub(super) struct Config {
    fields: Fields,
    experts: usize,
    chosen: usize,
    /// Channels of an expert, if they are not those of the MLPs.
    channels: Option<usize>,
    router: RouterShape,
    activation: Option<Activation>,
    family: ExpertFamily,
}

impl Config {
    /// `activation` is that of the model's MLPs.
    pub fn read(text: &Value, family: ExpertFamily, activation: Option<Activation>) -> Result<Self, String> {
        let fields = Fields::deserialize(text).map_err(|error| error.to_string())?.in_common_names()?;
        let experts = fields.n_routed_experts.or(fields.num_local_experts).or(fields.num_experts);
        let experts = experts.ok_or("it has no n_routed_experts, num_local_experts or num_experts")?;
        let chosen = fields.num_experts_per_tok.ok_or("it has no num_experts_per_tok")?;
        let channels = same(fields.moe_intermediate_size.as_ref(), "moe_intermediate_size")?;
        if !(1..=MOST_EXPERTS).contains(&experts) {
            return Err(format!(
                "the number of experts is {experts}: it must be between 1 and {MOST_EXPERTS}"
            ));
        }
        if !(1..=experts).contains(&chosen) {
            return Err(format!("num_experts_per_tok is {chosen}: it must be between 1 and {experts}"));
        }
        let scale = fields.routed_scaling_factor.unwrap_or(1.0);
        if !scale.is_finite() {
            return Err(format!("routed_scaling_factor is {scale}: it must be a number"));
        }
        let named = |name: &str| match name {
            "softmax" => Ok(Scores::Softmax),
            "sigmoid" => Ok(Scores::Sigmoid),
            "sqrtsoftplus" => Ok(Scores::RootSoftplus),
            other => Err(format!("scoring_func is {other:?}: softmax, sigmoid and sqrtsoftplus are known")),
        };
        let scores = fields.scoring_func.as_deref().map(named).transpose()?.unwrap_or(family.scores);
        let router = RouterShape {
            scores,
            bias: family.biased,
            correction: family.correction,
            groups: groups(&fields, (experts, chosen), family.best_of_group)?,
            renormalise: fields.norm_topk_prob.unwrap_or(family.renormalise),
            scale,
            assigned: false,
        };
        let limit = fields.swiglu_limit.unwrap_or(if family.limited { 10.0 } else { 7.0 });
        if !(limit.is_finite() && limit > 0.0) {
            return Err(format!("swiglu_limit is {limit}: it must be above 0"));
        }
        let alpha = fields.swiglu_alpha.unwrap_or(GPT_OSS_ALPHA);
        if !(alpha.is_finite() && alpha > 0.0) {
            return Err(format!("swiglu_alpha is {alpha}: it must be above 0"));
        }
        let activation = match (family.clamped, family.limited) {
            (true, _) => Some(Activation::Clamped { alpha, limit }),
            (false, true) => Some(Activation::Limited { limit }),
            (false, false) => activation,
        };
        let activation = activation.filter(|_| !family.ungated);
        if family.ungated && fields.mlp_bias == Some(true) {
            return Err("mlp_bias is true: experts without biases are supported".into());
        }
        if let Some(width) = fields.moe_latent_size {
            if !(1..=1 << 20).contains(&width) {
                return Err(format!("moe_latent_size is {width}: it must be between 1 and {}", 1 << 20));
            }
            let shared = fields.n_shared_experts.filter(|count| *count > 0);
            if fields.moe_shared_expert_intermediate_size.or(shared).is_none() {
                return Err("moe_latent_size needs a shared expert: it has no \
                            moe_shared_expert_intermediate_size and no num_shared_experts"
                    .into());
            }
        }
        if fields.use_bias == Some(true) {
            return Err("use_bias is true: experts with biases of this kind are not supported".into());
        }
        if family.weighs_input && chosen != 1 {
            return Err(format!("num_experts_per_tok is {chosen}: 1 is supported"));
        }
        Ok(Self {
            fields,
            experts,
            chosen,
            channels: channels.filter(|&channels| channels > 0),
            router,
            activation,
            family,
        })
    }

    /// The activation of gates, also in layers without experts, if the family limits it.
    pub fn limited_activation(&self) -> Option<Activation> {
        self.activation.filter(|_| self.family.limited || self.family.clamped)
    }

    /// The experts of a layer; `None` if it has a gated MLP, with `channels` channels.
    pub fn shape(&self, layer: usize, channels: Option<usize>) -> Result<Option<ExpertsShape>, String> {
        if !self.has_experts(layer)? {
            return Ok(None);
        }
        let channels =
            self.channels.or(channels).ok_or("it has neither moe_intermediate_size nor intermediate_size")?;
        let shared = match (self.fields.shared_expert_intermediate_size, self.fields.n_shared_experts) {
            _ if let Some(channels) = self.fields.moe_shared_expert_intermediate_size => {
                Some(SharedShape { channels, gated: false })
            }
            (Some(channels), _) if channels > 0 => {
                Some(SharedShape { channels, gated: !self.family.plain_shared })
            }
            (_, Some(count)) if count > 0 => {
                Some(SharedShape { channels: count.saturating_mul(channels), gated: false })
            }
            _ => None,
        };
        let most = 1 << 31;
        for (what, value) in
            [("an expert", channels), ("the shared expert", shared.map_or(1, |s| s.channels))]
        {
            if value == 0 || value > most {
                return Err(format!("{what} has {value} channels: it must have between 1 and {most}"));
            }
        }
        Ok(Some(ExpertsShape {
            experts: self.experts,
            chosen: self.chosen,
            channels,
            bias: self.router.bias,
            activation: self.activation,
            latent: self.fields.moe_latent_size,
            latent_norm: self.fields.latent_moe_use_norm,
            router: self.router(layer),
            shared,
            weighs_input: self.family.weighs_input,
            transposed: self.family.transposed,
        }))
    }

    /// The router of a layer. If a table gives the experts, the router has no correction.
    fn router(&self, layer: usize) -> RouterShape {
        let assigned = match &self.fields.mlp_layer_types {
            Some(types) => types.get(layer).is_some_and(|kind| kind == "hash_moe"),
            None => layer < self.fields.num_hash_layers.unwrap_or(self.family.assigned),
        };
        match assigned && self.family.assigned > 0 {
            true => {
                RouterShape { assigned, correction: Correction::None, groups: None, ..self.router.clone() }
            }
            false => self.router.clone(),
        }
    }

    fn has_experts(&self, layer: usize) -> Result<bool, String> {
        let Fields { mlp_layer_types, mlp_only_layers, .. } = &self.fields;
        if let Some(types) = mlp_layer_types {
            return match types.get(layer).map(String::as_str) {
                Some("sparse") => Ok(true),
                Some("moe" | "hash_moe") if self.family.assigned > 0 => Ok(true),
                Some("dense") => Ok(false),
                other => Err(format!("mlp_layer_types[{layer}] is {other:?}: dense and sparse are known")),
            };
        }
        if let Some(layers) = &self.fields.moe_layers {
            return Ok(layers.contains(&layer));
        }
        let step = |step: Option<usize>| step.unwrap_or(1).max(1);
        let from = self.fields.first_k_dense_replace.unwrap_or(0);
        let last = self.fields.moe_layer_end_index.and_then(|last| usize::try_from(last).ok());
        Ok(layer >= from
            && last.is_none_or(|last| layer <= last)
            && layer.is_multiple_of(step(self.fields.moe_layer_freq))
            && (layer + 1).is_multiple_of(step(self.fields.decoder_sparse_step))
            && !mlp_only_layers.contains(&layer))
    }
}

/// Groups that restrict the choice.
fn groups(
    fields: &Fields,
    (experts, of_token): (usize, usize),
    best: usize,
) -> Result<Option<ExpertGroups>, String> {
    let grouped = !matches!(fields.topk_method.as_deref(), Some("greedy"));
    let (Some(count), Some(chosen), true) = (fields.n_group, fields.topk_group, grouped) else {
        return Ok(None);
    };
    if count <= 1 {
        return Ok(None);
    }
    if !experts.is_multiple_of(count) {
        return Err(format!("n_group is {count}: it must divide the {experts} experts"));
    }
    let of_chosen = chosen.saturating_mul(experts / count);
    if chosen > count || of_chosen < of_token {
        return Err(format!(
            "topk_group is {chosen} of {count} groups: it must leave at least {of_token} experts to choose from"
        ));
    }
    Ok(Some(ExpertGroups { count, chosen, best }))
}
