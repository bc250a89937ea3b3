//! The layer that predicts further tokens.

use super::{FeedForwardSpec, LayerSpec, MixerSpec, ModelSpec};

/// A layer that predicts the token after the next one (multi-token prediction, `nextn`), from the
/// model's last hidden state at a position and the embedding of the following token. A projection
/// combines both, after a norm of each, into one vector. Then come the layer, a norm, and the
/// model's output head.
///
/// Source: DeepSeek-V3 Technical Report, section 2.2.
#[derive(Debug, Clone, PartialEq)]
pub struct AheadSpec {
    /// The layer itself. Its number is the count of the model's other layers.
    pub layer: LayerSpec,
    /// The projection's first columns are for the hidden state, not for the embedding (MiMo).
    pub hidden_first: bool,
    /// For the token after that, the layer's output is the hidden state after the layer's last norm
    /// instead of before it (Qwen3-Next, MiMo).
    pub chains_normed: bool,
}

impl AheadSpec {
    /// The additional layer of a model with these layers, given that it has one: a layer like its
    /// last one; with gated delta rules, like its last layer with attention. `None` if the layer
    /// would not be known: with other states; if the stream, its embedding or the logits are
    /// scaled; and with several residual streams or sums.
    pub(crate) fn like_the_last(spec: &ModelSpec, hidden_first: bool, chains_normed: bool) -> Option<Self> {
        let keeps_state = |layer: &LayerSpec| {
            matches!(
                layer.mixer,
                MixerSpec::ChannelDelta(_)
                    | MixerSpec::StateSpace(_)
                    | MixerSpec::GatedConv(_)
                    | MixerSpec::Compressed(_)
            )
        };
        if spec.streams.is_some() || spec.residual_block.is_some() {
            return None;
        }
        let scales = [spec.embedding_scale, spec.residual_scale, spec.logit_scale];
        if spec.layers.iter().any(keeps_state) || spec.centered || scales.iter().any(|scale| *scale != 1.0) {
            return None;
        }
        let attends = |layer: &&LayerSpec| !matches!(layer.mixer, MixerSpec::Delta(_));
        let mut layer = spec.layers.iter().rfind(attends)?.clone();
        match &mut layer.mixer {
            MixerSpec::Attention(attention) if attention.keys_of.is_some() => return None,
            MixerSpec::Latent(latent) => {
                if let Some(selection) = &mut latent.selection {
                    selection.selects = true;
                }
            }
            _ => {}
        }
        let is_whole = layer.mixer != MixerSpec::None && layer.feed_forward != FeedForwardSpec::None;
        is_whole.then_some(Self { layer, hidden_first, chains_normed })
    }
}
