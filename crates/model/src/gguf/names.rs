//! GGUF's tensor names. A new name for a role is a new entry in these tables.

use crate::weights::{ExpertRole, LayerRole, Role};

/// A name under which a role may be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    /// The whole name of a tensor.
    pub tensor: String,
    /// True if the tensor is a stack over all experts.
    pub stacked: bool,
}

/// The names that a role may have, the usual one first. Empty: no supported architecture has this
/// role in GGUF files.
pub(super) fn names_of(role: Role) -> Vec<Name> {
    let plain = |tensor: String| Name { tensor, stacked: false };
    match role {
        Role::Embedding => vec![plain("token_embd.weight".into())],
        Role::OutputNorm => vec![plain("output_norm.weight".into())],
        Role::OutputHead => vec![plain("output.weight".into())],
        Role::Layer(layer, role) => {
            layer_name(role).map(|name| plain(format!("blk.{layer}.{name}"))).into_iter().collect()
        }
        Role::LatentHead { .. } => Vec::new(),
        Role::Expert { layer, role, index, .. } => {
            let name = expert_name(role);
            // Files written before 2024 have a tensor for each expert.
            vec![
                Name { tensor: format!("blk.{layer}.{name}_exps.weight"), stacked: true },
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
const fn layer_name(role: LayerRole) -> Option<&'static str> {
    Some(match role {
        LayerRole::MixerNorm => "attn_norm.weight",
        LayerRole::FeedForwardNorm => "ffn_norm.weight",
        LayerRole::Query => "attn_q.weight",
        LayerRole::Key => "attn_k.weight",
        LayerRole::Value => "attn_v.weight",
        LayerRole::AttentionOut => "attn_output.weight",
        LayerRole::QueryNorm => "attn_q_norm.weight",
        LayerRole::KeyNorm => "attn_k_norm.weight",
        LayerRole::Gate => "ffn_gate.weight",
        LayerRole::Up => "ffn_up.weight",
        LayerRole::Down => "ffn_down.weight",
        LayerRole::Router => "ffn_gate_inp.weight",
        LayerRole::RouterCorrection => "exp_probs_b.bias",
        LayerRole::SharedGate => "ffn_gate_shexp.weight",
        LayerRole::SharedUp => "ffn_up_shexp.weight",
        LayerRole::SharedDown => "ffn_down_shexp.weight",
        LayerRole::SharedExpertGate => "ffn_gate_inp_shexp.weight",
        // Latent attention and delta rule: GGUF stores some of their tensors in another form.
        _ => return None,
    })
}

const fn expert_name(role: ExpertRole) -> &'static str {
    match role {
        ExpertRole::GateUp => "ffn_gate_up",
        ExpertRole::Gate => "ffn_gate",
        ExpertRole::Up => "ffn_up",
        ExpertRole::Down => "ffn_down",
    }
}
