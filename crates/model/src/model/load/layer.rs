//! What a rank reads for one layer.

use thunder_compute::{Backend, KvLayer, MatrixSource};

use super::attention::AttentionSources;
use super::gated::GatedSources;
use super::sources::ShardView;
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::{Layer, Mixer};
use crate::spec::{FeedForwardSpec, MixerSpec};
use crate::weights::LayerRole;

/// What a rank reads for one layer.
pub(super) struct LayerSources<'a> {
    /// Before the mixer, and before the feed-forward.
    norms: [Vec<f32>; 2],
    mixer: MixerSources<'a>,
    feed_forward: FeedForwardSources<'a>,
}

enum MixerSources<'a> {
    Attention(AttentionSources<'a>),
}

enum FeedForwardSources<'a> {
    Gated(GatedSources<'a>),
}

impl<'a> LayerSources<'a> {
    /// Describes the rank's part of a layer.
    pub fn describe(view: &ShardView<'a>, layer: usize) -> Result<Self, ModelError> {
        let hidden = view.spec.hidden;
        let spec = &view.spec.layers[layer];
        let mixer = match &spec.mixer {
            MixerSpec::Attention(shape) => {
                MixerSources::Attention(AttentionSources::describe(view, layer, shape)?)
            }
        };
        let feed_forward = match &spec.feed_forward {
            FeedForwardSpec::Gated(shape) => {
                FeedForwardSources::Gated(GatedSources::describe(view, layer, shape)?)
            }
        };
        let norms = [
            view.vector(layer, LayerRole::MixerNorm, hidden)?,
            view.vector(layer, LayerRole::FeedForwardNorm, hidden)?,
        ];
        Ok(Self { norms, mixer, feed_forward })
    }

    /// All matrices of the layer.
    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let mut matrices = match &self.mixer {
            MixerSources::Attention(attention) => attention.matrices(),
        };
        let feed_forward = match &self.feed_forward {
            FeedForwardSources::Gated(gated) => gated.matrices(),
        };
        matrices.extend(feed_forward);
        matrices
    }

    /// The layer's part of the KV cache.
    pub fn kv(&self) -> KvLayer {
        match &self.mixer {
            MixerSources::Attention(attention) => attention.kv(),
        }
    }

    /// Packs the layer.
    pub fn upload<B: Backend>(self, eps: f32, upload: &mut Upload<'_, B>) -> Result<Layer<B>, ModelError> {
        let mixer = match self.mixer {
            MixerSources::Attention(attention) => Mixer::Attention(Box::new(attention.upload(upload)?)),
        };
        let feed_forward = match self.feed_forward {
            FeedForwardSources::Gated(gated) => gated.upload(upload)?,
        };
        Ok(Layer { norms: self.norms.map(|norm| upload.vector(&norm)), eps, mixer, feed_forward })
    }
}
