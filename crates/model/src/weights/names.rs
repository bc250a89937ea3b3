//! Hugging Face's and MLX's tensor names. A new name for a role is a new entry in these tables.

use super::role::{ExpertRole, LatentHeadRole, LayerRole, Role};
use super::safetensors::SafetensorsFiles;

/// Modules of encoders' embeddings, and the prefix before the number of a layer: of BERT and
/// encoders with the same names, and of ModernBERT.
const ENCODERS: [(&str, &str); 2] =
    [("embeddings.word_embeddings", "encoder.layer."), ("embeddings.tok_embeddings", "layers.")];

/// Names of one folder's tensors.
#[derive(Debug)]
pub(super) struct Names {
    /// Precedes the embedding, `layers` and the last norm.
    prefix: String,
    /// Module of the embedding, after the prefix.
    table: &'static str,
    /// Module of the output head.
    head: String,
    ahead: Option<AheadNames>,
    /// Precedes the number of a layer.
    layers: String,
}

/// Names of the layer that predicts further tokens, if it is not among the other layers.
#[derive(Debug)]
struct AheadNames {
    /// Its number.
    number: usize,
    /// Precedes the names of what any layer has.
    layer: String,
    /// Precedes the names of what only this layer has.
    own: String,
}

/// A name under which a role may be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    /// The module of a matrix (its tensors are `.weight`, `.scales`, …), or the whole name of a
    /// vector.
    pub path: String,
    /// True if the tensor is a stack over all experts or heads.
    pub stacked: bool,
}

impl Names {
    /// Wrapped models put the language model under different prefixes, so the prefix is read from
    /// the files.
    pub fn find(files: &SafetensorsFiles) -> Self {
        for (table, layers) in ENCODERS {
            let end = format!("{table}.weight");
            if let Some(prefix) = files.name_ending(&end).and_then(|name| name.strip_suffix(&end)) {
                let (prefix, layers) = (prefix.to_owned(), format!("{prefix}{layers}"));
                return Self { prefix, table, head: String::new(), ahead: None, layers };
            }
        }
        // The second is Nemotron-H's, the third DeepSeek V4's, the last Sarvam's.
        const TABLES: [&str; 4] = ["embed_tokens", "embeddings", "embed", "word_embeddings"];
        const HEAD: &str = "lm_head";
        let whole = |prefix: &&str| prefix.is_empty() || prefix.ends_with('.');
        let ending = |table: &'static str| {
            let end = format!("{table}.weight");
            let name = files.name_ending(&end)?;
            Some((name.strip_suffix(&end).filter(whole)?, table))
        };
        let (prefix, table) = TABLES.into_iter().find_map(ending).unwrap_or(("model.", TABLES[0]));
        // Usually next to the model, not inside it.
        let module = |end: &str| files.name_ending(end).and_then(|name| name.strip_suffix(".weight"));
        let head = module("lm_head.weight").or_else(|| module("head.weight").filter(|name| *name == "head"));
        let head = head.unwrap_or(HEAD).to_owned();
        let layers = format!("{prefix}layers.");
        Self { ahead: find_ahead(files, prefix), prefix: prefix.to_owned(), table, head, layers }
    }

    /// Prefix of the names of a layer's tensors.
    fn layer(&self, layer: usize) -> String {
        match &self.ahead {
            Some(ahead) if ahead.number == layer => ahead.layer.clone(),
            _ => format!("{}{layer}.", self.layers),
        }
    }

    /// The names that a role may have; the files have one of them.
    pub fn of(&self, role: Role) -> Vec<Name> {
        let plain = |path: String| Name { path, stacked: false };
        match role {
            Role::Embedding => vec![plain(format!("{}{}", self.prefix, self.table))],
            Role::LayerInputs => self.of_model(&["embed_tokens_per_layer"]),
            Role::LayerInputsProjection => self.of_model(&["per_layer_model_projection"]),
            Role::LayerInputsNorm => self.of_model(&["per_layer_projection_norm.weight"]),
            Role::OutputNorm => ["norm", "norm_f", "final_norm", "embedding_norm"]
                .map(|name| plain(format!("{}{name}.weight", self.prefix)))
                .into(),
            Role::OutputMixNorm => vec![plain(format!("{}output_attn_res_norm.weight", self.prefix))],
            Role::OutputMix => vec![plain(format!("{}output_attn_res_proj.weight", self.prefix))],
            Role::OutputHead => vec![plain(self.head.clone())],
            Role::OutputStreams => self.of_model(&["hc_head_fn", "hc_head.hc_fn"]),
            Role::OutputStreamsBase => self.of_model(&["hc_head_base", "hc_head.hc_base"]),
            Role::OutputStreamsScale => self.of_model(&["hc_head_scale", "hc_head.hc_scale"]),
            Role::Positions => self.of_model(&["embeddings.position_embeddings"]),
            Role::TokenTypes => self.of_model(&["embeddings.token_type_embeddings"]),
            Role::EmbeddingNorm => {
                let names = ["LayerNorm.weight", "LayerNorm.gamma", "norm.weight"];
                self.of_model(
                    &names.map(|name| ["embeddings.", name].concat()).each_ref().map(|name| &**name),
                )
            }
            Role::EmbeddingNormBias => {
                self.of_model(&["embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"])
            }
            // RoBERTa's files may have BERT's pooler as well, which its classifier does not use.
            Role::Pooler => {
                vec![plain("classifier.dense".into()), plain(format!("{}pooler.dense", self.prefix))]
            }
            Role::Classifier => ["classifier.out_proj", "classifier"].map(|name| plain(name.into())).into(),
            Role::Layer(layer, role) => {
                let before = match &self.ahead {
                    Some(ahead) if ahead.number == layer && is_own_of_ahead(role) => ahead.own.clone(),
                    _ => self.layer(layer),
                };
                layer_names(role).iter().map(|name| plain(format!("{before}{name}"))).collect()
            }
            Role::Expert { layer, role, index, .. } => expert_names(role)
                .iter()
                .map(|(before, after)| {
                    let module = format!("{}{before}", self.layer(layer));
                    match after {
                        Some(after) => plain(format!("{module}.{index}.{after}")),
                        None => Name { path: module, stacked: true },
                    }
                })
                .collect(),
            Role::LatentHead { layer, role, .. } => {
                let name = match role {
                    LatentHeadRole::Absorb => "embed_q",
                    LatentHeadRole::Expand => "unembed_out",
                };
                let path = format!("{}self_attn.{name}", self.layer(layer));
                vec![Name { path, stacked: true }]
            }
        }
    }
}

impl Names {
    fn of_model(&self, names: &[&str]) -> Vec<Name> {
        names.iter().map(|name| Name { path: format!("{}{name}", self.prefix), stacked: false }).collect()
    }

    /// The stack in which gate and up rows of all experts alternate, as in gpt-oss, and whether
    /// this role's rows are the first or the second of each pair.
    pub fn by_turns(&self, role: Role) -> Option<(String, usize)> {
        let Role::Expert { layer, role, .. } = role else { return None };
        let turn = match role {
            ExpertRole::Gate => 0,
            ExpertRole::Up => 1,
            ExpertRole::GateUp | ExpertRole::Down => return None,
        };
        Some((format!("{}mlp.experts.gate_up_proj", self.layer(layer)), turn))
    }
}

/// MiMo's and Qwen's files have the layer that predicts further tokens under a separate name.
fn find_ahead(files: &SafetensorsFiles, prefix: &str) -> Option<AheadNames> {
    const MIMO: [&str; 2] = ["mtp_layers.0.", "input_proj.weight"];
    const QWEN: [&str; 2] = ["mtp.", "pre_fc_norm_embedding.weight"];
    let before = |[module, tensor]: [&str; 2]| {
        let name = files.name_ending(&format!("{module}{tensor}"))?;
        Some(name.strip_suffix(tensor)?.to_owned())
    };
    let (layer, own) = match (before(MIMO), before(QWEN)) {
        (Some(layer), _) => (layer.clone(), layer),
        (None, own) => {
            // A layer with its own embedding (`mtp_use_dedicated_embeddings`) is not used.
            let own = own.filter(|own| files.name_starting(&format!("{own}embed_tokens")).is_none())?;
            (format!("{own}layers.0."), own)
        }
    };
    let has = |layer: &usize| files.name_starting(&format!("{prefix}layers.{layer}.")).is_some();
    Some(AheadNames { number: (0..).take_while(has).count(), layer, own })
}

/// True for what only the layer that predicts further tokens has.
const fn is_own_of_ahead(role: LayerRole) -> bool {
    matches!(
        role,
        LayerRole::AheadEmbeddingNorm
            | LayerRole::AheadHiddenNorm
            | LayerRole::AheadProjection
            | LayerRole::AheadOutputNorm
    )
}

/// Projections that adapters can change.
const ADAPTED: [LayerRole; 9] = [
    LayerRole::Query,
    LayerRole::Key,
    LayerRole::Value,
    LayerRole::Qkv,
    LayerRole::AttentionOut,
    LayerRole::Gate,
    LayerRole::Up,
    LayerRole::GateUp,
    LayerRole::Down,
];

/// The layer and the role of a module that an adapter changes, such as
/// `base_model.model.model.layers.3.self_attn.q_proj`. `None` for parts of a checkpoint that are
/// not the language model.
pub(super) fn adapted_module(module: &str) -> Option<(usize, LayerRole)> {
    let (before, after) = match module.strip_prefix("layers.") {
        Some(after) => ("", after),
        None => module.split_once(".layers.")?,
    };
    let is_wrapper = |part: &str| ["", "base_model", "model", "language_model"].contains(&part);
    let (layer, name) = after.split_once('.')?;
    let role = ADAPTED.into_iter().find(|role| layer_names(*role).contains(&name))?;
    before.split('.').all(is_wrapper).then_some((layer.parse().ok()?, role))
}

/// Modules of matrices, whole names of vectors, from the layer on.
const fn layer_names(role: LayerRole) -> &'static [&'static str] {
    match role {
        LayerRole::LayerScale => &["layer_scalar"],
        LayerRole::InputGate => &["per_layer_input_gate"],
        LayerRole::InputOut => &["per_layer_projection"],
        LayerRole::InputPostNorm => &["post_per_layer_input_norm.weight"],
        LayerRole::MixerStreams => &["hc_attn_fn", "attn_hc.fn"],
        LayerRole::MixerStreamsBase => &["hc_attn_base", "attn_hc.base"],
        LayerRole::MixerStreamsScale => &["hc_attn_scale", "attn_hc.scale"],
        LayerRole::FeedForwardStreams => &["hc_ffn_fn", "ffn_hc.fn"],
        LayerRole::FeedForwardStreamsBase => &["hc_ffn_base", "ffn_hc.base"],
        LayerRole::FeedForwardStreamsScale => &["hc_ffn_scale", "ffn_hc.scale"],
        LayerRole::MixerNorm => {
            &["input_layernorm.weight", "norm.weight", "attn_norm.weight", "operator_norm.weight"]
        }
        // Gemma's files have both names; the second is that of the mixer's norm.
        LayerRole::FeedForwardNorm => &[
            "pre_feedforward_layernorm.weight",
            "post_attention_layernorm.weight",
            "norm.weight",
            "ffn_norm.weight",
            "mlp_norm.weight",
        ],
        // Old files of BERT have the names gamma and beta.
        LayerRole::MixerPostNorm => &[
            "post_self_attn_layernorm.weight",
            "post_norm1.weight",
            "post_attention_layernorm.weight",
            "attention.output.LayerNorm.weight",
            "attention.output.LayerNorm.gamma",
            "post_operator_norm.weight",
        ],
        LayerRole::MixerPostNormBias => {
            &["attention.output.LayerNorm.bias", "attention.output.LayerNorm.beta"]
        }
        LayerRole::FeedForwardPostNorm => &[
            "post_feedforward_layernorm.weight",
            "post_mlp_layernorm.weight",
            "post_norm2.weight",
            "output.LayerNorm.weight",
            "output.LayerNorm.gamma",
            "post_ffn_norm.weight",
        ],
        LayerRole::FeedForwardPostNormBias => &["output.LayerNorm.bias", "output.LayerNorm.beta"],
        LayerRole::Qkv => &["self_attn.qkv_proj", "attn.Wqkv", "attention.query_key_value"],
        LayerRole::Query => &["self_attn.q_proj", "mixer.q_proj", "attention.self.query"],
        LayerRole::Key => &["self_attn.k_proj", "mixer.k_proj", "attention.self.key"],
        LayerRole::Value => &["self_attn.v_proj", "mixer.v_proj", "attention.self.value"],
        LayerRole::AttentionOut => &[
            "self_attn.o_proj",
            "mixer.o_proj",
            "attn.wo_b",
            "self_attn.o_b_proj",
            "attention.output.dense",
            "attn.Wo",
            "self_attn.out_proj",
            "attention.dense",
        ],
        LayerRole::QueryNorm => &[
            "self_attn.q_norm.weight",
            "self_attn.query_layernorm.weight",
            "self_attn.q_layernorm.weight",
            "attention.query_layernorm.weight",
        ],
        LayerRole::KeyNorm => &[
            "self_attn.k_norm.weight",
            "self_attn.key_layernorm.weight",
            "self_attn.k_layernorm.weight",
            "attention.key_layernorm.weight",
        ],
        // Flint's published files have the last.
        LayerRole::AttentionSinks => &[
            "self_attn.sinks",
            "self_attn.attention_sink_bias",
            "attn.attn_sink",
            "self_attn.softmax_offset",
        ],
        LayerRole::QueryDown => &["self_attn.q_a_proj", "attn.wq_a"],
        LayerRole::QueryDownNorm => {
            &["self_attn.q_a_layernorm.weight", "attn.q_norm.weight", "self_attn.q_a_norm.weight"]
        }
        LayerRole::QueryUp => &["self_attn.q_b_proj", "attn.wq_b"],
        LayerRole::KvDown => &["self_attn.kv_a_proj_with_mqa", "attn.wkv", "self_attn.kv_proj"],
        // Transformers writes the third, as its renaming has no way back.
        LayerRole::KvDownNorm => &[
            "self_attn.kv_a_layernorm.weight",
            "attn.kv_norm.weight",
            "attn.norm.weight",
            "self_attn.kv_norm.weight",
        ],
        LayerRole::OutGroups => &["attn.wo_a", "self_attn.o_a_proj"],
        LayerRole::CompressedValues => &["attn.compressor.wkv", "self_attn.compressor.kv_proj"],
        LayerRole::CompressedGates => &["attn.compressor.wgate", "self_attn.compressor.gate_proj"],
        LayerRole::CompressedPlaces => &["attn.compressor.ape", "self_attn.compressor.position_bias"],
        LayerRole::CompressedNorm => &["attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"],
        LayerRole::IndexValues => &["attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"],
        LayerRole::IndexGates => &[
            "attn.indexer.compressor.wgate",
            "self_attn.compressor.indexer.gate_proj",
            "self_attn.indexer.index_kpool_compress_gate",
        ],
        LayerRole::IndexPlaces => &[
            "attn.indexer.compressor.ape",
            "self_attn.compressor.indexer.position_bias",
            "self_attn.indexer.index_kpool_compress_ape",
        ],
        LayerRole::KvUp => &["self_attn.kv_b_proj"],
        LayerRole::DeltaQkvz => &["linear_attn.in_proj_qkvz"],
        LayerRole::DeltaBa => &["linear_attn.in_proj_ba"],
        LayerRole::DeltaQkv => &["linear_attn.in_proj_qkv"],
        LayerRole::DeltaGate => &["linear_attn.in_proj_z"],
        LayerRole::DeltaBeta => &["linear_attn.in_proj_b", "self_attn.b_proj"],
        LayerRole::DeltaDecay => &["linear_attn.in_proj_a"],
        LayerRole::DeltaConvolution => &[
            "linear_attn.conv1d.weight",
            "self_attn.conv1d.weight",
            "mixer.conv1d.weight",
            "mamba.conv1d.weight",
            "self_attn.qkv_conv.conv.weight",
            "conv.conv.weight",
        ],
        LayerRole::DeltaLogRate => &["linear_attn.A_log", "self_attn.A_log", "mixer.A_log", "mamba.A_log"],
        LayerRole::DeltaTimeBias => {
            &["linear_attn.dt_bias", "self_attn.dt_bias", "mixer.dt_bias", "mamba.dt_bias"]
        }
        LayerRole::DeltaNorm => {
            &["linear_attn.norm.weight", "self_attn.o_norm.weight", "mixer.norm.weight", "mamba.norm.weight"]
        }
        LayerRole::ConvIn => &["conv.in_proj"],
        LayerRole::StateIn => &["mixer.in_proj", "mamba.in_proj"],
        LayerRole::ConvolutionBias => &["mixer.conv1d.bias", "mamba.conv1d.bias"],
        LayerRole::StateSkip => &["mixer.D", "mamba.D"],
        LayerRole::ExpertsDown => &[
            "mixer.fc1_latent_proj",
            "mlp.routed_expert_down_proj",
            "block_sparse_moe.routed_expert_down_proj",
        ],
        LayerRole::ExpertsUp => {
            &["mixer.fc2_latent_proj", "mlp.routed_expert_up_proj", "block_sparse_moe.routed_expert_up_proj"]
        }
        LayerRole::ExpertsLatentNorm => {
            &["mlp.routed_expert_norm.weight", "block_sparse_moe.routed_expert_norm.weight"]
        }
        LayerRole::MixerMixNorm => &["self_attention_res_norm.weight"],
        LayerRole::MixerMix => &["self_attention_res_proj.weight"],
        LayerRole::FeedForwardMixNorm => &["mlp_res_norm.weight"],
        LayerRole::FeedForwardMix => &["mlp_res_proj.weight"],
        // LFM3 has the second.
        LayerRole::OutputGate => &["self_attn.g_proj", "self_attn.gate_proj"],
        LayerRole::QueryConvolution => &["self_attn.q_conv1d.weight", "self_attn.q_conv.conv.weight"],
        LayerRole::KeyConvolution => &["self_attn.k_conv1d.weight", "self_attn.k_conv.conv.weight"],
        LayerRole::ValueConvolution => &["self_attn.v_conv1d.weight", "self_attn.v_conv.conv.weight"],
        LayerRole::DecayDown => &["self_attn.f_a_proj"],
        LayerRole::DecayUp => &["self_attn.f_b_proj"],
        LayerRole::OutputGateDown => &["self_attn.g_a_proj"],
        LayerRole::OutputGateUp => &["self_attn.g_b_proj"],
        LayerRole::IndexQuery => &[
            "self_attn.indexer.wq_b",
            "attn.indexer.wq_b",
            "self_attn.compressor.indexer.q_b_proj",
            "self_attn.indexer.q_b_proj",
        ],
        LayerRole::IndexKey => &["self_attn.indexer.wk", "attn.indexer.wk", "self_attn.indexer.k_proj"],
        LayerRole::IndexNorm => &[
            "self_attn.indexer.k_norm.weight",
            "attn.indexer.k_norm.weight",
            "attn.indexer.compressor.norm.weight",
            "self_attn.compressor.indexer.kv_norm.weight",
        ],
        LayerRole::IndexNormBias => &["self_attn.indexer.k_norm.bias"],
        LayerRole::IndexWeights => &[
            "self_attn.indexer.weights_proj",
            "attn.indexer.weights_proj",
            "self_attn.compressor.indexer.scorer.weights_proj",
        ],
        LayerRole::EngramTables => &["engram.embed"],
        LayerRole::EngramProduct => &["engram.wkv"],
        LayerRole::EngramStreams => &["engram.q_weight"],
        LayerRole::EngramKeys => &["engram.k_weight"],
        LayerRole::DeltaOut => &["linear_attn.out_proj", "mixer.out_proj", "mamba.out_proj", "conv.out_proj"],
        // The second name is from Granite 4 without experts, the third from ModernBERT.
        LayerRole::GateUp => &["mlp.gate_up_proj", "shared_mlp.input_linear", "mlp.Wi"],
        LayerRole::Gate => {
            &["mlp.gate_proj", "feed_forward.gate_proj", "block_sparse_moe.gate_proj", "feed_forward.w1"]
        }
        LayerRole::Up => &[
            "mlp.up_proj",
            "feed_forward.up_proj",
            "block_sparse_moe.up_proj",
            "mixer.up_proj",
            "intermediate.dense",
            "feed_forward.w3",
        ],
        LayerRole::Down => &[
            "mlp.down_proj",
            "feed_forward.down_proj",
            "block_sparse_moe.down_proj",
            "mixer.down_proj",
            "shared_mlp.output_linear",
            "output.dense",
            "mlp.Wo",
            "feed_forward.w2",
        ],
        LayerRole::Router => &[
            "mlp.gate",
            "block_sparse_moe.gate",
            "mlp.router",
            "mlp.gate.wg",
            "feed_forward.router",
            "mixer.gate",
            "ffn.gate",
            "router.proj",
            "mlp.router.gate",
            "block_sparse_moe.router.layer",
            "block_sparse_moe.router",
            "feed_forward.gate",
        ],
        LayerRole::RouterTable => &["mlp.gate.tid2eid", "ffn.gate.tid2eid"],
        LayerRole::RouterNorm => &["router.scale"],
        LayerRole::RouterFactors => &["router.per_expert_scale"],
        LayerRole::ExpertsNorm => &["pre_feedforward_layernorm_2.weight"],
        LayerRole::ExpertsPostNorm => &["post_feedforward_layernorm_2.weight"],
        LayerRole::MlpPostNorm => &["post_feedforward_layernorm_1.weight"],
        LayerRole::RouterCorrection => &[
            "mlp.gate.e_score_correction_bias",
            "block_sparse_moe.e_score_correction_bias",
            "block_sparse_moe.gate.e_score_correction_bias",
            "mlp.moe_statics.e_score_correction_bias",
            "mlp.e_score_correction_bias",
            "mlp.expert_bias",
            "mixer.gate.e_score_correction_bias",
            "mlp.gate.expert_bias",
            "ffn.gate.bias",
            "feed_forward.expert_bias",
        ],
        LayerRole::SharedGateUp => &[
            "mlp.shared_experts.gate_up_proj",
            "block_sparse_moe.shared_experts.gate_up_proj",
            "shared_mlp.input_linear",
        ],
        LayerRole::SharedGate => &[
            "mlp.shared_expert.gate_proj",
            "mlp.shared_experts.gate_proj",
            "block_sparse_moe.shared_experts.gate_proj",
            "mlp.shared_mlp.gate_proj",
            "feed_forward.shared_expert.gate_proj",
            "ffn.shared_experts.w1",
        ],
        LayerRole::SharedUp => &[
            "mlp.shared_expert.up_proj",
            "mlp.shared_experts.up_proj",
            "block_sparse_moe.shared_experts.up_proj",
            "mlp.shared_mlp.up_proj",
            "feed_forward.shared_expert.up_proj",
            "mixer.shared_experts.up_proj",
            "ffn.shared_experts.w3",
        ],
        LayerRole::SharedDown => &[
            "mlp.shared_expert.down_proj",
            "mlp.shared_experts.down_proj",
            "block_sparse_moe.shared_experts.down_proj",
            "mlp.shared_mlp.down_proj",
            "feed_forward.shared_expert.down_proj",
            "mixer.shared_experts.down_proj",
            "ffn.shared_experts.w2",
            "shared_mlp.output_linear",
        ],
        LayerRole::SharedExpertGate => &["mlp.shared_expert_gate"],
        LayerRole::AheadEmbeddingNorm => {
            &["enorm.weight", "token_layernorm.weight", "pre_fc_norm_embedding.weight"]
        }
        LayerRole::AheadHiddenNorm => {
            &["hnorm.weight", "hidden_layernorm.weight", "pre_fc_norm_hidden.weight"]
        }
        LayerRole::AheadProjection => &["eh_proj", "input_proj", "fc"],
        LayerRole::AheadOutputNorm => &["shared_head.norm.weight", "final_layernorm.weight", "norm.weight"],
    }
}

/// The parts of the name before and after the expert's number; MLX stacks the experts' matrices and
/// has no number.
const fn expert_names(role: ExpertRole) -> &'static [(&'static str, Option<&'static str>)] {
    match role {
        ExpertRole::GateUp => &[
            ("mlp.experts.gate_up_proj", None),
            ("feed_forward.experts.gate_up_proj", None),
            ("experts.gate_up_proj", None),
            ("block_sparse_moe.input_linear", None),
            ("block_sparse_moe.experts.gate_up_proj", None),
        ],
        ExpertRole::Gate => &[
            ("mlp.switch_mlp.gate_proj", None),
            ("mlp.experts.gate_proj", None),
            ("mlp.experts.switch_mlp.gate_proj", None),
            ("block_sparse_moe.switch_mlp.gate_proj", None),
            ("mlp.experts", Some("gate_proj")),
            ("block_sparse_moe.experts", Some("w1")),
            ("ffn.experts", Some("w1")),
            ("feed_forward.experts.gate_proj", None),
            ("feed_forward.switch_mlp.gate_proj", None),
            ("feed_forward.experts", Some("w1")),
            ("experts.switch_glu.gate_proj", None),
        ],
        ExpertRole::Up => &[
            ("mlp.switch_mlp.up_proj", None),
            ("mlp.experts.up_proj", None),
            ("mlp.experts.switch_mlp.up_proj", None),
            ("block_sparse_moe.switch_mlp.up_proj", None),
            ("mlp.experts", Some("up_proj")),
            ("block_sparse_moe.experts", Some("w3")),
            ("ffn.experts", Some("w3")),
            ("feed_forward.experts.up_proj", None),
            ("feed_forward.switch_mlp.up_proj", None),
            ("feed_forward.experts", Some("w3")),
            ("mixer.switch_mlp.fc1", None),
            ("mixer.experts", Some("up_proj")),
            ("experts.switch_glu.up_proj", None),
        ],
        ExpertRole::Down => &[
            ("mlp.switch_mlp.down_proj", None),
            ("mlp.experts.down_proj", None),
            ("mlp.experts.switch_mlp.down_proj", None),
            ("block_sparse_moe.switch_mlp.down_proj", None),
            ("mlp.experts", Some("down_proj")),
            ("block_sparse_moe.experts", Some("w2")),
            ("block_sparse_moe.experts.down_proj", None),
            ("ffn.experts", Some("w2")),
            ("feed_forward.experts.down_proj", None),
            ("feed_forward.switch_mlp.down_proj", None),
            ("feed_forward.experts", Some("w2")),
            ("mixer.switch_mlp.fc2", None),
            ("mixer.experts", Some("down_proj")),
            ("experts.switch_glu.down_proj", None),
            ("experts.down_proj", None),
            ("block_sparse_moe.output_linear", None),
        ],
    }
}
