//! What a rank reads for one layer.

use thunder_compute::{Backend, CacheKind, Extra, LayerNorm, MatrixSource};

use super::attention::AttentionSources;
use super::both::BothSources;
use super::channel_delta::ChannelDeltaSources;
use super::compressed::CompressedSources;
use super::delta::DeltaSources;
use super::engram::EngramSources;
use super::experts::ExpertsSources;
use super::gated_conv::GatedConvSources;
use super::latent::LatentSources;
use super::layer_inputs::LayerInputSources;
use super::mlp::MlpSources;
use super::sources::ShardView;
use super::state_space::StateSpaceSources;
use super::streams::ConnectionSources;
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::feed_forward::FeedForward;
use crate::model::mix::Mix;
use crate::model::mixer::Mixer;
use crate::model::{After, Before, Layer, Norms};
use crate::spec::{self, FeedForwardSpec, MixerSpec};
use crate::weights::LayerRole;

/// What a rank reads for one layer.
pub(super) struct LayerSources<'a> {
    /// Multiplies the residual stream after the layer.
    scale: f32,
    /// Tables with vectors that are added before the mixer.
    engram: Option<EngramSources<'a>>,
    /// What the layer does with its input.
    input: Option<LayerInputSources<'a>>,
    /// Connections of both parts to several residual streams.
    connections: Option<[ConnectionSources<'a>; 2]>,
    /// The norm that both parts read.
    shared_norm: Option<Vec<f32>>,
    /// Norms of the mixer, and of the feed-forward.
    norms: [NormsSources; 2],
    /// Mixes of the residual stream's sums, for the mixer and for the feed-forward.
    mixes: Option<[Mix; 2]>,
    mixer: MixerSources<'a>,
    feed_forward: FeedForwardSources<'a>,
}

/// A layer part's norms.
struct NormsSources {
    shared: bool,
    /// The input is a mix of the residual stream's sums.
    mixed: bool,
    before: Option<Vec<f32>>,
    after: Option<Vec<f32>>,
    of_stream: Option<LayerNorm>,
}

impl NormsSources {
    fn describe(
        view: &ShardView<'_>,
        layer: usize,
        [before, after, bias]: [LayerRole; 3],
    ) -> Result<Self, ModelError> {
        let norms = view.spec.layer(layer).norms;
        let norm = |role: LayerRole, has: bool| match has {
            true => view.norm(role.of(layer), view.spec.hidden).map(Some),
            false => Ok(None),
        };
        let (shared, mixed) = (norms == spec::Norms::Shared, view.spec.residual_block.is_some());
        let of_stream = match norms {
            spec::Norms::Sum => Some(view.layer_norm(after.of(layer), Some(bias.of(layer)))?),
            _ => None,
        };
        let (before, after) = (norm(before, norms.before())?, norm(after, norms.after())?);
        Ok(Self { shared, mixed, before, after, of_stream })
    }

    /// The weights of the norm before the part, which another part of the model applies to the
    /// input.
    fn take_before(&mut self) -> Vec<f32> {
        self.shared = true;
        self.before.take().unwrap_or_default()
    }

    fn upload<B: Backend>(
        self,
        (before_eps, after_eps): (f32, f32),
        upload: &mut Upload<'_, B>,
    ) -> Result<Norms<B>, ModelError> {
        let after = match self.after {
            Some(weights) => Some(After {
                sum_buffer: upload.shared_buffer("sum", weights.len())?,
                normed_buffer: upload.shared_buffer("normed sum", weights.len())?,
                norm: upload.norm(&weights, after_eps)?,
            }),
            None => None,
        };
        let before = match self.before {
            Some(weights) if self.mixed => Before::Mixed(upload.norm(&weights, before_eps)?),
            Some(weights) => Before::Norm(upload.norm(&weights, before_eps)?),
            None if self.shared => Before::Shared,
            None => Before::Stream,
        };
        Ok(Norms { before, after, of_stream: self.of_stream })
    }
}

enum MixerSources<'a> {
    None,
    Attention(Box<AttentionSources<'a>>),
    Latent(Box<LatentSources<'a>>),
    Delta(Box<DeltaSources<'a>>),
    ChannelDelta(Box<ChannelDeltaSources<'a>>),
    StateSpace(Box<StateSpaceSources<'a>>),
    GatedConv(Box<GatedConvSources<'a>>),
    Compressed(Box<CompressedSources<'a>>),
}

enum FeedForwardSources<'a> {
    None,
    Mlp(Box<MlpSources<'a>>),
    Experts(Box<ExpertsSources<'a>>),
    Both(Box<BothSources<'a>>),
}

impl<'a> LayerSources<'a> {
    /// Describes the rank's part of a layer.
    pub fn describe(view: &ShardView<'a>, layer: usize) -> Result<Self, ModelError> {
        let spec = view.spec.layer(layer);
        let mixer = match &spec.mixer {
            MixerSpec::None => MixerSources::None,
            MixerSpec::StateSpace(shape) => {
                MixerSources::StateSpace(Box::new(StateSpaceSources::describe(view, layer, shape)?))
            }
            MixerSpec::GatedConv(shape) => {
                MixerSources::GatedConv(Box::new(GatedConvSources::describe(view, layer, *shape)?))
            }
            MixerSpec::Compressed(shape) => {
                MixerSources::Compressed(Box::new(CompressedSources::describe(view, layer, shape)?))
            }
            MixerSpec::Attention(shape) => {
                MixerSources::Attention(Box::new(AttentionSources::describe(view, layer, shape)?))
            }
            MixerSpec::Latent(shape) => {
                MixerSources::Latent(Box::new(LatentSources::describe(view, layer, shape)?))
            }
            MixerSpec::Delta(shape) => {
                MixerSources::Delta(Box::new(DeltaSources::describe(view, layer, shape)?))
            }
            MixerSpec::ChannelDelta(shape) => {
                MixerSources::ChannelDelta(Box::new(ChannelDeltaSources::describe(view, layer, shape)?))
            }
        };
        let feed_forward = match &spec.feed_forward {
            FeedForwardSpec::None => FeedForwardSources::None,
            FeedForwardSpec::Mlp(shape) => {
                FeedForwardSources::Mlp(Box::new(MlpSources::describe(view, layer, shape)?))
            }
            FeedForwardSpec::Experts(shape) => {
                FeedForwardSources::Experts(Box::new(ExpertsSources::describe(view, layer, shape)?))
            }
            FeedForwardSpec::Both(shape) => {
                FeedForwardSources::Both(Box::new(BothSources::describe(view, layer, shape)?))
            }
        };
        if matches!(spec.feed_forward, FeedForwardSpec::Both(_)) && spec.norms != spec::Norms::Around {
            return Err(ModelError::Unsupported {
                field: "the place of norms",
                value: format!("{:?} of an MLP and experts", spec.norms),
                supported: "norms before and after them are".into(),
            });
        }
        let norms_of = |is_there: bool, roles: [LayerRole; 3]| match is_there {
            true => NormsSources::describe(view, layer, roles),
            false => {
                Ok(NormsSources { shared: false, mixed: false, before: None, after: None, of_stream: None })
            }
        };
        let has_mixer = spec.mixer != MixerSpec::None;
        let has_feed_forward = spec.feed_forward != FeedForwardSpec::None;
        let norms = [
            norms_of(
                has_mixer && spec.norms != spec::Norms::BeforeFeedForward,
                [LayerRole::MixerNorm, LayerRole::MixerPostNorm, LayerRole::MixerPostNormBias],
            )?,
            norms_of(
                has_feed_forward,
                [
                    LayerRole::FeedForwardNorm,
                    LayerRole::FeedForwardPostNorm,
                    LayerRole::FeedForwardPostNormBias,
                ],
            )?,
        ];
        let shared_norm = match spec.norms == spec::Norms::Shared {
            true => Some(view.norm(LayerRole::MixerNorm.of(layer), view.spec.hidden)?),
            false => None,
        };
        if view.spec.residual_block.is_some() && spec.norms != spec::Norms::Before {
            return Err(ModelError::Unsupported {
                field: "attn_res_block_size",
                value: format!("with norms {:?}", spec.norms),
                supported: "norms before a layer's parts are".into(),
            });
        }
        let [before, after] = [layer, layer + 1].map(|layer| view.spec.sums_before(layer));
        let of_mixer =
            view.mix([LayerRole::MixerMixNorm, LayerRole::MixerMix].map(|role| role.of(layer)), before)?;
        let roles = [LayerRole::FeedForwardMixNorm, LayerRole::FeedForwardMix];
        let mixes = of_mixer.zip(view.mix(roles.map(|role| role.of(layer)), after)?).map(|(a, b)| [a, b]);
        let scale = match spec.scaled {
            true => view.vector(layer, LayerRole::LayerScale, 1)?[0],
            false => 1.0,
        };
        let of_layer = |streams| ConnectionSources::of_layer(view, layer, streams);
        let connections = view.spec.streams.map(of_layer).transpose()?;
        let engram = EngramSources::describe(view, layer)?;
        let input = LayerInputSources::describe(view, layer)?;
        Ok(Self { scale, engram, input, connections, shared_norm, norms, mixes, mixer, feed_forward })
    }

    /// All matrices of the layer.
    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let mut matrices = match &self.mixer {
            MixerSources::None => Vec::new(),
            MixerSources::StateSpace(space) => space.matrices().collect(),
            MixerSources::GatedConv(conv) => conv.matrices().into(),
            MixerSources::Compressed(compressed) => compressed.matrices().collect(),
            MixerSources::Attention(attention) => attention.matrices(),
            MixerSources::Latent(latent) => latent.matrices(),
            MixerSources::Delta(delta) => delta.matrices(),
            MixerSources::ChannelDelta(delta) => delta.matrices(),
        };
        let feed_forward = match &self.feed_forward {
            FeedForwardSources::None => Vec::new(),
            FeedForwardSources::Mlp(mlp) => mlp.matrices(),
            FeedForwardSources::Experts(experts) => experts.matrices(),
            FeedForwardSources::Both(both) => both.matrices(),
        };
        matrices.extend(feed_forward);
        matrices.extend(self.engram.iter().flat_map(EngramSources::matrices));
        matrices.extend(self.input.iter().flat_map(LayerInputSources::matrices));
        matrices.extend(self.connections.iter().flatten().map(ConnectionSources::matrix));
        matrices
    }

    /// Bytes of what adapters change of the layer.
    pub fn adapter_bytes(&self) -> u64 {
        let mixer = match &self.mixer {
            MixerSources::Attention(attention) => attention.adapter_bytes(),
            _ => 0,
        };
        mixer
            + match &self.feed_forward {
                FeedForwardSources::Mlp(mlp) => mlp.adapter_bytes(),
                FeedForwardSources::None | FeedForwardSources::Experts(_) | FeedForwardSources::Both(_) => 0,
            }
    }

    /// Operations that not every backend has.
    pub fn needs(&self) -> impl Iterator<Item = Extra> {
        let of_mixer = match &self.mixer {
            MixerSources::Attention(attention) => attention.needs(),
            MixerSources::Latent(latent) => latent.needs(),
            MixerSources::ChannelDelta(_) => Some(Extra::ChannelDeltaRule),
            MixerSources::StateSpace(_) => Some(Extra::StateSpace),
            MixerSources::GatedConv(_) => Some(Extra::GatedConv),
            MixerSources::Compressed(compressed) => compressed.needs(),
            MixerSources::Delta(_) | MixerSources::None => None,
        };
        let of_feed_forward = match &self.feed_forward {
            FeedForwardSources::Experts(experts) => experts.needs(),
            FeedForwardSources::Both(both) => both.needs(),
            FeedForwardSources::None | FeedForwardSources::Mlp(_) => None,
        };
        let of_tables = self.engram.as_ref().map(EngramSources::needs);
        of_mixer.into_iter().chain(of_feed_forward).chain(of_tables)
    }

    /// True if the layer has tables, even if this rank has no rows of them.
    pub const fn has_tables(&self) -> bool {
        self.engram.is_some()
    }

    /// Bytes that converted matrices take in memory beyond what they would take packed as they are.
    pub fn converted_bytes(&self) -> u64 {
        match &self.mixer {
            MixerSources::Latent(latent) => latent.converted_bytes(),
            _ => 0,
        }
    }

    /// Bytes of tables in memory; a token reads only a few rows.
    pub fn table_bytes(&self) -> u64 {
        self.engram.as_ref().map_or(0, EngramSources::table_bytes)
    }

    /// Bytes in memory of the matrices of routed experts.
    pub fn routed_bytes(&self) -> u64 {
        match &self.feed_forward {
            FeedForwardSources::None | FeedForwardSources::Mlp(_) => 0,
            FeedForwardSources::Experts(experts) => experts.routed_bytes(),
            FeedForwardSources::Both(both) => both.routed_bytes(),
        }
    }

    /// The caches that the layer keeps for a sequence.
    pub fn caches(&self) -> Vec<CacheKind> {
        let mut caches: Vec<CacheKind> = self.engram.iter().map(EngramSources::cache).collect();
        match &self.mixer {
            MixerSources::None => {}
            MixerSources::StateSpace(space) => caches.push(space.cache()),
            MixerSources::GatedConv(conv) => caches.push(conv.cache()),
            MixerSources::Compressed(compressed) => caches.extend(compressed.caches()),
            MixerSources::Attention(attention) => caches.extend(attention.cache()),
            MixerSources::Latent(latent) => caches.extend(latent.caches()),
            MixerSources::Delta(delta) => caches.push(delta.cache()),
            MixerSources::ChannelDelta(delta) => caches.push(delta.cache()),
        }
        caches
    }

    /// The cache that the layer attends to, and the most query heads for one of its heads.
    pub fn attention(&self) -> Option<(CacheKind, usize)> {
        match &self.mixer {
            MixerSources::Attention(attention) => Some(attention.attended()),
            MixerSources::Latent(latent) => Some(latent.attended()),
            _ => None,
        }
    }

    /// Packs the layer. Its caches are the next of `upload`'s.
    /// `eps` are those of norms of the residual stream and of sums.
    pub fn upload<B: Backend>(
        self,
        eps: (f32, f32),
        upload: &mut Upload<'_, B>,
    ) -> Result<Layer<B>, ModelError> {
        let engram = self.engram.map(|engram| engram.upload(upload)).transpose()?;
        let [mut mixer_norms, mut feed_forward_norms] = self.norms;
        let connections = match self.connections {
            Some([mixer, feed_forward]) => Some([
                mixer.upload_part((0, &mixer_norms.take_before()), upload)?,
                feed_forward.upload_part((1, &feed_forward_norms.take_before()), upload)?,
            ]),
            None => None,
        };
        let shared_norm = self.shared_norm.map(|weights| upload.norm(&weights, eps.0)).transpose()?;
        let mixer = match self.mixer {
            MixerSources::None => Mixer::None,
            MixerSources::StateSpace(space) => Mixer::StateSpace(Box::new(space.upload(upload)?)),
            MixerSources::GatedConv(conv) => Mixer::GatedConv(Box::new(conv.upload(upload)?)),
            MixerSources::Compressed(compressed) => Mixer::Compressed(Box::new(compressed.upload(upload)?)),
            MixerSources::Attention(attention) => Mixer::Attention(Box::new(attention.upload(upload)?)),
            MixerSources::Latent(latent) => Mixer::Latent(Box::new(latent.upload(upload)?)),
            MixerSources::Delta(delta) => Mixer::Delta(Box::new(delta.upload(upload)?)),
            MixerSources::ChannelDelta(delta) => Mixer::ChannelDelta(Box::new(delta.upload(upload)?)),
        };
        let feed_forward = match self.feed_forward {
            FeedForwardSources::None => FeedForward::None,
            FeedForwardSources::Mlp(mlp) => FeedForward::Mlp(mlp.upload(upload)?),
            FeedForwardSources::Experts(experts) => FeedForward::Experts(Box::new(experts.upload(upload)?)),
            FeedForwardSources::Both(both) => FeedForward::Both(Box::new(both.upload(eps.0, upload)?)),
        };
        let (mixer_norms, feed_forward_norms) =
            (mixer_norms.upload(eps, upload)?, feed_forward_norms.upload(eps, upload)?);
        let (scale, mixes) = (self.scale, self.mixes);
        let input = self.input.map(|input| input.upload(eps.1, upload)).transpose()?;
        Ok(Layer {
            scale,
            engram,
            input,
            connections,
            shared_norm,
            mixes,
            mixer_norms,
            mixer,
            feed_forward_norms,
            feed_forward,
        })
    }
}
