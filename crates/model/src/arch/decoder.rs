//! Decoders: a mixer (attention of heads, latent attention, the delta rule) and a feed-forward (a
//! gated MLP or experts) in every layer.

use std::path::Path;

use serde_json::Value;
use thunder_compute::{Curve, Rope};

use super::config::Config;
use super::family::{Convolutions, Family, Rotations, Sharing, StateSpaces};
use super::nemotron::Block;
use super::{
    TokenIds, deepseek4, deepseek41, delta, engram, experts, gemma4, glm53, granite4, kimi, latent, lfm2,
    mimo, minicpm, minimax3, nemotron, rope, selection, streams,
};
use crate::error::ModelError;
use crate::spec::{
    AheadSpec, AttentionShape, BothShape, EncoderSpec, FeedForwardSpec, LatentShape, LayerSpec, MixerSpec,
    MlpShape, ModelSpec, Norms, QkNormWidth,
};

/// Index of the rotation of layers without a window, or of all layers.
const ROPE: usize = 0;
/// Index of the rotation of layers with a window, if it is another.
const WINDOW_ROPE: usize = 1;

/// Index of the rotation of an indexer.
const INDEXER_ROPE: usize = 1;

/// Attention to compressed tokens.
enum Compressed {
    Own(deepseek4::Config),
    Shared(deepseek41::Config),
}

impl Compressed {
    fn read(sharing: Sharing, text: &Value, config: &Config) -> Result<Self, String> {
        match sharing {
            Sharing::None => deepseek4::Config::read(text, config.num_hidden_layers).map(Self::Own),
            Sharing::Sources => deepseek41::Config::read(text).map(Self::Shared),
        }
    }
}

/// The parts from which layers are made.
struct Parts<'a> {
    config: &'a Config,
    family: &'a Family,
    latent: Option<latent::Latent>,
    gemma4: Option<gemma4::Config>,
    mimo: Option<mimo::Config>,
    selection: Option<selection::Config>,
    delta: Option<delta::Config>,
    channel_delta: Option<kimi::Config>,
    compressed: Option<Compressed>,
    spaces: Option<nemotron::Config>,
    convolutions: Option<lfm2::Config>,
    experts: Option<experts::Config>,
    mlp: Result<MlpShape, String>,
    score_scale: f32,
}

/// The spec of a model. `text` is the config, `path` is for error texts.
pub(super) fn spec(text: &Value, family: &Family, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    let mut text = with_defaults(text, family).map_err(malformed)?;
    text = match family.state_spaces {
        StateSpaces::None => text,
        StateSpaces::Apart => nemotron::in_common_names(text).map_err(malformed)?,
        StateSpaces::ForAttention => granite4::in_common_names(text).map_err(malformed)?,
    };
    if family.convolutions != Convolutions::None {
        let adjusts = family.convolutions == Convolutions::Adjusted;
        text = lfm2::in_common_names(text, adjusts).map_err(malformed)?;
    }
    if family.window_heads {
        text = mimo::in_common_names(text).map_err(malformed)?;
    }
    if family.minimax3 {
        text = minimax3::in_common_names(text).map_err(malformed)?;
    }
    if family.minicpm {
        text = minicpm::in_common_names(text).map_err(malformed)?;
    }
    if family.glm53 {
        text = glm53::in_common_names(text).map_err(malformed)?;
    }
    let config = Config::read(&text).map_err(malformed)?;
    config.check_supported()?;
    let latent = match family.latent {
        true => Some(latent::Config::read(&text).and_then(|l| l.shape(&config, family)).map_err(malformed)?),
        false => None,
    };
    let selection = family.indexer.map(|_| selection::Config::read(&text)).transpose().map_err(malformed)?;
    let gemma4 = family.global_heads.then(|| gemma4::Config::read(&text)).transpose().map_err(malformed)?;
    let compressed = family.compressed.map(|sharing| Compressed::read(sharing, &text, &config));
    let compressed = compressed.transpose().map_err(malformed)?;
    let mut ropes = match &compressed {
        Some(Compressed::Own(of)) => of.ropes(&config, &malformed)?,
        Some(Compressed::Shared(of)) => of.ropes(&config, &malformed)?,
        None => ropes(&config, family, (latent.as_ref(), gemma4.as_ref()), path)?,
    };
    if let (Some(selection), Some(interleaved), false) = (&selection, family.indexer, ropes.is_empty()) {
        // The order of ROPE and INDEXER_ROPE.
        ropes.push(Rope { interleaved: selection.interleaved(interleaved), ..ropes[ROPE].clone() });
    }
    let has_spaces = family.state_spaces != StateSpaces::None;
    let spaces = has_spaces.then(|| nemotron::Config::read(&text)).transpose().map_err(malformed)?;
    let has_convolutions = family.convolutions != Convolutions::None;
    let convolutions = has_convolutions.then(|| lfm2::Config::read(&text)).transpose().map_err(malformed)?;
    let has_experts = match family.state_spaces {
        StateSpaces::None => true,
        StateSpaces::Apart => spaces.as_ref().is_some_and(nemotron::Config::has_experts),
        StateSpaces::ForAttention => granite4::has_experts(&text),
    };
    let has_experts = has_experts && gemma4.as_ref().is_none_or(gemma4::Config::has_experts);
    let activation = if family.ungated_mlp { None } else { Some(config.activation()?) };
    let mlp = |activation| {
        let curve = Curve::default();
        Ok(MlpShape { channels: config.mlp_channels()?, bias: config.mlp_bias(), activation, curve })
    };
    let experts =
        family.experts.filter(|_| has_experts).map(|of| experts::Config::read(&text, of, activation));
    let experts = experts.transpose().map_err(malformed)?;
    let parts = Parts {
        delta: family.delta.then(|| delta::Config::read(&text)).transpose().map_err(malformed)?,
        channel_delta: family
            .channel_delta
            .then(|| kimi::Config::read(&text))
            .transpose()
            .map_err(malformed)?,
        selection,
        gemma4,
        mimo: family.window_heads.then(|| mimo::Config::read(&text)).transpose().map_err(malformed)?,
        mlp: mlp(experts.as_ref().and_then(experts::Config::limited_activation).or(activation)),
        experts,
        spaces,
        convolutions,
        compressed,
        score_scale: config.score_scale().map_err(malformed)?,
        config: &config,
        family,
        latent,
    };
    let layers = (0..config.num_hidden_layers).map(|index| parts.layer(index));
    let engram = match family.compressed {
        Some(Sharing::Sources) => {
            engram::read(&text, config.num_hidden_layers, config.vocab_size).map_err(malformed)?
        }
        _ => None,
    };
    let layer_inputs = parts.gemma4.as_ref().and_then(gemma4::Config::inputs);
    let mut spec = ModelSpec {
        layers: layers.collect::<Result<_, _>>().map_err(malformed)?,
        ahead: None,
        further: config.num_nextn_predict_layers.unwrap_or(0),
        hidden: config.hidden_size,
        vocab: config.vocab_size,
        context: config.max_position_embeddings,
        engram,
        layer_inputs,
        norm_eps: config.rms_norm_eps,
        streams: family
            .streams
            .map(|reading| streams::read(&text, reading))
            .transpose()
            .map_err(malformed)?,
        norms_less_one: family.norms_less_one,
        centered: family.centered,
        embedding_scale: config.embedding_scale(family).map_err(malformed)?,
        residual_scale: config.residual_scale().map_err(malformed)?,
        logit_scale: config.logit_scale(family).map_err(malformed)?,
        logit_cap: config.logit_cap().map_err(malformed)?,
        tied: config.tie_word_embeddings,
        residual_block: config.residual_block().map_err(malformed)?,
        encoder: config.is_encoder().then(EncoderSpec::of_decoder),
        ropes,
        family: config.model_type,
        eos: config.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
    };
    if spec.further > 0 || family.ahead_unannounced {
        spec.ahead = AheadSpec::like_the_last(&spec, family.ahead_hidden_first, family.ahead_chains_normed);
    }
    Ok(spec)
}

/// The config with the family's defaults for what it leaves out.
fn with_defaults(text: &Value, family: &Family) -> Result<Value, String> {
    let mut text = text.clone();
    let defaults: Value = serde_json::from_str(family.defaults).map_err(|error| error.to_string())?;
    if let (Some(fields), Value::Object(defaults)) = (text.as_object_mut(), defaults) {
        for (field, value) in defaults {
            fields.entry(field).or_insert(value);
        }
    }
    Ok(text)
}

/// The rotations of a model: that of all layers, or two, see [`ROPE`] and [`WINDOW_ROPE`].
fn ropes(
    config: &Config,
    family: &Family,
    (latent, gemma4): (Option<&latent::Latent>, Option<&gemma4::Config>),
    path: &Path,
) -> Result<Vec<Rope>, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    if family.rotations == Rotations::Nowhere {
        return Ok(Vec::new());
    }
    let (dims, interleaved) = match latent {
        Some(latent) => (latent.rotated, latent.interleaved),
        None => (config.rotated_dims().map_err(malformed)?, family.interleaved),
    };
    let rope_of = |dims: usize, base: Option<f64>, scaling: Option<&rope::RopeParameters>| {
        let theta = base.unwrap_or(10_000.0);
        if !(theta.is_finite() && theta > 1.0) {
            return Err(malformed(format!("rope_theta is {theta}: it must be above 1")));
        }
        let lengths = rope::Lengths {
            context: config.max_position_embeddings,
            original: config.original_max_position_embeddings,
        };
        Ok(Rope { interleaved, ..rope::rope(theta, dims, scaling, lengths)? })
    };
    let rope = |base, scaling| rope_of(dims, base, scaling);
    let scaling = config.scaling();
    let base = config.rope_theta.or(scaling.and_then(|s| s.rope_theta));
    if let Some(bases) = config.layer_bases() {
        return bases.into_iter().map(|base| rope(Some(base), scaling)).collect();
    }
    if family.rotations != Rotations::UnscaledInWindows {
        return Ok(vec![rope(base, scaling)?]);
    }
    // Transformers 5 writes a set for each type of layer, older versions a single one and another
    // base.
    let set = |kind: &str| match scaling {
        Some(scaling) => scaling.of_layers(kind).map_err(malformed),
        None => Ok(None),
    };
    let everywhere = match set("full_attention")? {
        Some(set) => {
            let dims = gemma4.map_or(dims, gemma4::Config::head_dim);
            rope_of(dims, set.rope_theta.or(base), Some(&set))?
        }
        None => rope(base, scaling)?,
    };
    let in_windows = match set("sliding_attention")? {
        Some(set) => rope(set.rope_theta.or(config.rope_local_base_freq).or(base), Some(&set))?,
        None => rope(config.rope_local_base_freq.or(base), None)?,
    };
    // The order of ROPE and WINDOW_ROPE.
    Ok(vec![everywhere, in_windows])
}

impl Parts<'_> {
    fn layer(&self, index: usize) -> Result<LayerSpec, String> {
        match (&self.spaces, self.family.state_spaces) {
            (Some(spaces), StateSpaces::Apart) => self.single_part(index, spaces),
            _ => self.usual_layer(index),
        }
    }

    fn norms(&self) -> Norms {
        match self.config.use_post_norm {
            Some(false) => Norms::Before,
            _ => self.family.norms,
        }
    }

    /// A layer that is a mixer or a feed-forward.
    fn single_part(&self, index: usize, spaces: &nemotron::Config) -> Result<LayerSpec, String> {
        let (mut mixer, mut feed_forward) = (MixerSpec::None, FeedForwardSpec::None);
        match (spaces.block(index)?, &self.experts) {
            (Block::StateSpace, _) => mixer = MixerSpec::StateSpace(spaces.space()),
            (Block::Attention, _) => mixer = MixerSpec::Attention(self.attention(index)?),
            (Block::Experts, Some(experts)) => {
                let shape = experts.shape(index, self.config.channels().ok())?;
                feed_forward = shape.map_or(FeedForwardSpec::None, FeedForwardSpec::Experts);
            }
            (Block::Mlp | Block::Experts, _) => feed_forward = FeedForwardSpec::Mlp(self.mlp.clone()?),
        }
        Ok(LayerSpec { mixer, feed_forward, norms: self.norms(), scaled: false })
    }

    /// A layer with a mixer and a feed-forward.
    fn usual_layer(&self, index: usize) -> Result<LayerSpec, String> {
        let delta = match &self.delta {
            Some(delta) => delta.shape(index)?,
            None => None,
        };
        let channel_delta = match &self.channel_delta {
            Some(delta) => delta.shape(index)?,
            None => None,
        };
        let space = match &self.spaces {
            Some(spaces) => spaces.for_attention(index)?,
            None => None,
        };
        let convolution = match &self.convolutions {
            Some(convolutions) => convolutions.shape(index)?,
            None => None,
        };
        let mixer = match (&self.latent, delta) {
            _ if let Some(shape) = convolution => MixerSpec::GatedConv(shape),
            _ if let Some(shape) = space => MixerSpec::StateSpace(shape),
            _ if let Some(compressed) = &self.compressed => MixerSpec::Compressed(match compressed {
                Compressed::Own(of) => of.shape(index, self.config)?,
                Compressed::Shared(of) => of.shape(index, self.config)?,
            }),
            _ if let Some(shape) = channel_delta => MixerSpec::ChannelDelta(shape),
            (_, Some(shape)) => MixerSpec::Delta(shape),
            (Some(latent), None) => {
                let temperature = self.config.temperature(index)?;
                // A context that is never longer than a selection is attended to whole.
                let selects = |of: &&selection::Config| of.chosen() < self.config.max_position_embeddings;
                let selection = self.selection.as_ref().filter(selects);
                let selection = selection
                    .map(|of| of.shape(index, latent.shape.rope.map(|_| INDEXER_ROPE)))
                    .transpose()?;
                MixerSpec::Latent(LatentShape { temperature, selection, ..latent.shape.clone() })
            }
            (None, None) => {
                let shape = self.attention(index)?;
                MixerSpec::Attention(match (&self.gemma4, &self.mimo) {
                    (Some(gemma4), _) => {
                        let has_window =
                            |layer| Ok(self.config.window(self.family.windows, layer)?.is_some());
                        let keys_of = gemma4.keys_of(index, self.config.num_hidden_layers, has_window)?;
                        gemma4.shape(AttentionShape { keys_of, ..shape })?
                    }
                    (_, Some(mimo)) => mimo.shape(shape)?,
                    (None, None) => shape,
                })
            }
        };
        let experts = match &self.experts {
            Some(experts) => experts.shape(index, self.config.channels().ok())?,
            None => None,
        };
        let feed_forward = match experts {
            Some(experts) if self.gemma4.is_some() => {
                FeedForwardSpec::Both(Box::new(BothShape { mlp: self.mlp(index)?, experts }))
            }
            Some(shape) => FeedForwardSpec::Experts(shape),
            None => FeedForwardSpec::Mlp(self.mlp(index)?),
        };
        let scaled = self.gemma4.is_some();
        Ok(LayerSpec { mixer, feed_forward, norms: self.norms(), scaled })
    }

    fn mlp(&self, index: usize) -> Result<MlpShape, String> {
        let mlp = self.mlp.clone()?;
        match &self.gemma4 {
            Some(gemma4) => gemma4.mlp(index, self.config.num_hidden_layers, mlp),
            None => Ok(mlp),
        }
    }

    fn attention(&self, index: usize) -> Result<AttentionShape, String> {
        let Self { config, family, .. } = self;
        let bias = config.attention_bias.or(config.use_qkv_bias).or(config.use_bias);
        let mut window = config.window(family.windows, index)?;
        let mut scoring = config.scoring(index)?;
        if let Some(window) = window.as_mut().filter(|_| config.is_encoder()) {
            // Half of it is before a token, and half after it.
            (*window, scoring.after) = (*window / 2 + 1, *window / 2);
        }
        let rope = match (family.rotations, window) {
            _ if !config.rotates(index)? => None,
            _ if config.layer_bases().is_some() => config.layer_base(index)?,
            (Rotations::Nowhere, _) => None,
            // A model without windows rotates everywhere.
            (Rotations::InWindowsOnly, None) if config.sliding_window.is_some() => None,
            (Rotations::UnscaledInWindows, Some(_)) => Some(WINDOW_ROPE),
            _ => Some(ROPE),
        };
        let is_normed = config.use_qk_norm.unwrap_or(family.qk_norm);
        // Llama 4 norms what it rotates.
        let is_normed = is_normed && (rope.is_some() || family.qk_norm_width != QkNormWidth::Unweighted);
        Ok(AttentionShape {
            heads: config.num_attention_heads,
            kv_heads: config.kv_heads(),
            head_dim: config.head_dim(),
            value_dim: config.head_dim(),
            value_scale: 1.0,
            qkv_bias: bias.unwrap_or(family.qkv_bias),
            out_bias: config.attention_out_bias.unwrap_or(family.out_bias && bias.unwrap_or(false)),
            qk_norm: is_normed.then_some(family.qk_norm_width),
            value_norm: false,
            values_are_keys: false,
            keys_of: None,
            scale: self.score_scale,
            output_gate: config.attn_output_gate.unwrap_or(family.output_gate),
            head_gates: config.use_attention_gate.unwrap_or(family.head_gates),
            window,
            sinks: family.sinks,
            rope,
            temperature: config.temperature(index)?,
            scoring,
        })
    }
}
