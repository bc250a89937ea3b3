//! GGUF's tensor names. A new name for a role is a new entry in these tables.

use crate::weights::{ExpertRole, LatentHeadRole, LayerRole, Role};

/// A name under which a role may be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    /// The whole name of a tensor.
    pub tensor: String,
    /// True if the tensor is a stack over all experts or heads.
    pub stacked: bool,
}

/// The names that a role may have, the usual one first. Empty: no supported architecture has this
/// role in GGUF files.
pub(super) fn names_of(role: Role) -> Vec<Name> {
    let plain = |tensor: String| Name { tensor, stacked: false };
    let stack = |tensor: String| Name { tensor, stacked: true };
    match role {
        Role::Embedding => vec![plain("token_embd.weight".into())],
        // The second is that of LFM2.
        Role::OutputNorm => {
            ["output_norm", "token_embd_norm"].map(|name| plain(format!("{name}.weight"))).into()
        }
        // The norm is in the scores' vector.
        Role::OutputMixNorm => Vec::new(),
        Role::OutputMix => vec![plain("output_res_score.weight".into())],
        Role::OutputHead => vec![plain("output.weight".into())],
        Role::LayerInputs => vec![plain("per_layer_token_embd.weight".into())],
        Role::LayerInputsProjection => vec![plain("per_layer_model_proj.weight".into())],
        Role::LayerInputsNorm => vec![plain("per_layer_proj_norm.weight".into())],
        Role::OutputStreams => vec![plain("output_hc_fn.weight".into())],
        Role::OutputStreamsBase => vec![plain("output_hc_base.weight".into())],
        Role::OutputStreamsScale => vec![plain("output_hc_scale.weight".into())],
        Role::Positions
        | Role::TokenTypes
        | Role::EmbeddingNorm
        | Role::EmbeddingNormBias
        | Role::Pooler
        | Role::Classifier => Vec::new(),
        Role::Layer(layer, role) => {
            layer_names(role).iter().map(|name| plain(format!("blk.{layer}.{name}"))).collect()
        }
        Role::LatentHead { layer, role, .. } => {
            let name = match role {
                LatentHeadRole::Absorb => "attn_k_b",
                LatentHeadRole::Expand => "attn_v_b",
            };
            vec![stack(format!("blk.{layer}.{name}.weight"))]
        }
        Role::Expert { layer, role, index, .. } => {
            let name = expert_name(role);
            vec![
                stack(format!("blk.{layer}.{name}_exps.weight")),
                // Files written before 2024 have a tensor for each expert.
                plain(format!("blk.{layer}.{name}.{index}.weight")),
            ]
        }
    }
}

/// The bias of a matrix.
pub(super) fn bias_of(matrix: &str) -> String {
    format!("{}.bias", matrix.strip_suffix(".weight").unwrap_or(matrix))
}

/// Names from the layer on.
const fn layer_names(role: LayerRole) -> &'static [&'static str] {
    match role {
        LayerRole::MixerNorm => &["attn_norm.weight"],
        LayerRole::MixerPostNorm => &["post_attention_norm.weight"],
        // GLM-4.5, gpt-oss and Seed-OSS have the second.
        LayerRole::FeedForwardNorm => &["ffn_norm.weight", "post_attention_norm.weight"],
        LayerRole::FeedForwardPostNorm => &["post_ffw_norm.weight"],
        LayerRole::Qkv => &["attn_qkv.weight"],
        LayerRole::Query => &["attn_q.weight"],
        LayerRole::Key => &["attn_k.weight"],
        LayerRole::Value => &["attn_v.weight"],
        // DeepSeek V4 has the second names here and below.
        LayerRole::AttentionOut => &["attn_output.weight", "attn_output_b.weight"],
        LayerRole::QueryNorm => &["attn_q_norm.weight"],
        LayerRole::KeyNorm => &["attn_k_norm.weight"],
        LayerRole::AttentionSinks => &["attn_sinks.weight"],
        LayerRole::QueryDown => &["attn_q_a.weight"],
        LayerRole::QueryDownNorm => &["attn_q_a_norm.weight"],
        LayerRole::QueryUp => &["attn_q_b.weight"],
        LayerRole::KvDown => &["attn_kv_a_mqa.weight", "attn_kv.weight"],
        LayerRole::KvDownNorm => &["attn_kv_a_norm.weight"],
        LayerRole::KvUp => &["attn_kv_b.weight"],
        // Where there is no gate, both are in one.
        LayerRole::GateUp => &["ffn_up.weight"],
        LayerRole::Gate => &["ffn_gate.weight"],
        LayerRole::Up => &["ffn_up.weight"],
        LayerRole::Down => &["ffn_down.weight"],
        LayerRole::Router => &["ffn_gate_inp.weight"],
        // The second is Hunyuan 3's.
        LayerRole::RouterCorrection => &["exp_probs_b.bias", "exp_probs_b"],
        LayerRole::RouterNorm => &["ffn_gate_inp.scale"],
        LayerRole::RouterFactors => &["ffn_down_exps.scale"],
        LayerRole::ExpertsNorm => &["pre_ffw_norm_2.weight"],
        LayerRole::ExpertsPostNorm => &["post_ffw_norm_2.weight"],
        LayerRole::MlpPostNorm => &["post_ffw_norm_1.weight"],
        LayerRole::SharedGateUp => &["ffn_up_shexp.weight"],
        LayerRole::SharedGate => &["ffn_gate_shexp.weight"],
        LayerRole::SharedUp => &["ffn_up_shexp.weight"],
        LayerRole::SharedDown => &["ffn_down_shexp.weight"],
        LayerRole::SharedExpertGate => &["ffn_gate_inp_shexp.weight"],
        LayerRole::LayerScale => &["layer_output_scale.weight"],
        LayerRole::InputGate => &["inp_gate.weight"],
        LayerRole::InputOut => &["proj.weight"],
        LayerRole::InputPostNorm => &["post_norm.weight"],
        // Qwen3-Next's files before 2026 have queries, keys, values and gates in one.
        LayerRole::StateIn | LayerRole::DeltaQkvz => &["ssm_in.weight"],
        LayerRole::DeltaQkv => &["attn_qkv.weight"],
        LayerRole::DeltaGate => &["attn_gate.weight"],
        LayerRole::DeltaBa => &["ssm_ba.weight"],
        LayerRole::DeltaBeta => &["ssm_beta.weight"],
        LayerRole::DeltaDecay => &["ssm_alpha.weight"],
        LayerRole::QueryConvolution => &["ssm_conv1d_q.weight"],
        LayerRole::KeyConvolution => &["ssm_conv1d_k.weight"],
        LayerRole::ValueConvolution => &["ssm_conv1d_v.weight"],
        LayerRole::DecayDown => &["ssm_f_a.weight"],
        LayerRole::DecayUp => &["ssm_f_b.weight"],
        LayerRole::OutputGateDown => &["ssm_g_a.weight"],
        LayerRole::OutputGateUp => &["ssm_g_b.weight"],
        LayerRole::DeltaConvolution => &["ssm_conv1d.weight", "shortconv.conv.weight"],
        LayerRole::ConvIn => &["shortconv.in_proj.weight"],
        LayerRole::ConvolutionBias => &["ssm_conv1d.bias"],
        LayerRole::DeltaTimeBias => &["ssm_dt.bias"],
        LayerRole::DeltaLogRate => &["ssm_a"],
        LayerRole::StateSkip => &["ssm_d"],
        LayerRole::DeltaNorm => &["ssm_norm.weight"],
        LayerRole::DeltaOut => &["ssm_out.weight", "shortconv.out_proj.weight"],
        LayerRole::ExpertsDown => &["ffn_latent_down.weight", "ffn_routed_down.weight"],
        LayerRole::ExpertsUp => &["ffn_latent_up.weight", "ffn_routed_up.weight"],
        LayerRole::ExpertsLatentNorm => &["ffn_routed_norm.weight"],
        LayerRole::MixerMix => &["attn_res_score.weight"],
        LayerRole::FeedForwardMix => &["ffn_res_score.weight"],
        LayerRole::OutputGate => &["attn_gate.weight", "ssm_g.weight"],
        // These norms are in the scores' vectors.
        LayerRole::MixerMixNorm | LayerRole::FeedForwardMixNorm => &[],
        LayerRole::AheadEmbeddingNorm => &["nextn.enorm.weight"],
        LayerRole::AheadHiddenNorm => &["nextn.hnorm.weight"],
        LayerRole::AheadProjection => &["nextn.eh_proj.weight"],
        LayerRole::AheadOutputNorm => &["nextn.shared_head_norm.weight"],
        LayerRole::IndexQuery => &["indexer.attn_q_b.weight"],
        LayerRole::IndexKey => &["indexer.attn_k.weight"],
        LayerRole::IndexNorm => &["indexer.k_norm.weight", "indexer_compressor_norm.weight"],
        LayerRole::IndexNormBias => &["indexer.k_norm.bias"],
        LayerRole::IndexWeights => &["indexer.proj.weight"],
        LayerRole::MixerStreams => &["hc_attn_fn.weight"],
        LayerRole::MixerStreamsBase => &["hc_attn_base.weight"],
        LayerRole::MixerStreamsScale => &["hc_attn_scale.weight"],
        LayerRole::FeedForwardStreams => &["hc_ffn_fn.weight"],
        LayerRole::FeedForwardStreamsBase => &["hc_ffn_base.weight"],
        LayerRole::FeedForwardStreamsScale => &["hc_ffn_scale.weight"],
        LayerRole::IndexGates => &["indexer_compressor_gate.weight"],
        LayerRole::IndexPlaces => &["indexer_compressor_ape.weight"],
        LayerRole::OutGroups => &["attn_output_a.weight"],
        LayerRole::CompressedValues => &["attn_compressor_kv.weight"],
        LayerRole::CompressedGates => &["attn_compressor_gate.weight"],
        LayerRole::CompressedPlaces => &["attn_compressor_ape.weight"],
        LayerRole::CompressedNorm => &["attn_compressor_norm.weight"],
        LayerRole::IndexValues => &["indexer_compressor_kv.weight"],
        LayerRole::RouterTable => &["ffn_gate_tid2eid.weight"],
        // Encoders are not read from GGUF files.
        LayerRole::MixerPostNormBias | LayerRole::FeedForwardPostNormBias => &[],
        // llama.cpp has no such family.
        LayerRole::EngramTables
        | LayerRole::EngramProduct
        | LayerRole::EngramStreams
        | LayerRole::EngramKeys => &[],
    }
}

const fn expert_name(role: ExpertRole) -> &'static str {
    match role {
        ExpertRole::GateUp => "ffn_gate_up",
        ExpertRole::Gate => "ffn_gate",
        ExpertRole::Up => "ffn_up",
        ExpertRole::Down => "ffn_down",
    }
}
