//! Encoders: BERT, and RoBERTa and XLM-RoBERTa, which differ in the first position.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use thunder_compute::{Curve, Scoring};

use super::config::in_bounds;
use crate::error::ModelError;
use crate::pooling::Pooling;
use crate::spec::{
    AttentionShape, DenseFrom, DenseShape, EmbeddingNorm, EncoderSpec, FeedForwardSpec, LayerSpec, MixerSpec,
    MlpShape, ModelSpec, Norms, PositionsShape,
};

/// Properties of an encoder's family that its config does not contain.
pub(super) struct Family {
    /// `model_type`.
    pub name: &'static str,
    /// Positions start after that of padding.
    after_padding: bool,
}

/// Encoders that are read.
pub(super) const FAMILIES: [Family; 4] = [
    Family { name: "camembert", after_padding: true },
    Family { name: "bert", after_padding: false },
    Family { name: "roberta", after_padding: true },
    Family { name: "xlm-roberta", after_padding: true },
];

/// Fields of config.json, with the defaults of transformers' classes.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    architectures: Option<Vec<String>>,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    #[serde(default = "two")]
    type_vocab_size: usize,
    #[serde(default = "bert_eps")]
    layer_norm_eps: f32,
    #[serde(default)]
    hidden_act: Option<String>,
    #[serde(default)]
    position_embedding_type: Option<String>,
    #[serde(default)]
    pad_token_id: Option<usize>,
    #[serde(default)]
    is_decoder: bool,
    #[serde(default)]
    id2label: Option<Map<String, Value>>,
    #[serde(default)]
    num_labels: Option<usize>,
}

const fn two() -> usize {
    2
}

const fn bert_eps() -> f32 {
    1e-12
}

impl Config {
    /// Refuses what would be computed wrongly.
    fn check(&self) -> Result<(), String> {
        in_bounds(&[
            ("hidden_size", self.hidden_size, 1 << 31),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 12),
            ("num_attention_heads", self.num_attention_heads, 1 << 14),
            ("intermediate_size", self.intermediate_size, 1 << 31),
            ("vocab_size", self.vocab_size, 1 << 31),
        ])?;
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
            return Err(format!("hidden_size {hidden} does not divide into {heads} heads"));
        }
        if !(self.layer_norm_eps > 0.0 && self.layer_norm_eps.is_finite()) {
            return Err(format!("layer_norm_eps is {}: it must be above 0", self.layer_norm_eps));
        }
        // A token's id and type are one number.
        if self.vocab_size.saturating_mul(self.type_vocab_size) > u32::MAX as usize {
            return Err(format!("vocab_size {} with {} types", self.vocab_size, self.type_vocab_size));
        }
        Ok(())
    }

    fn curve(&self) -> Result<Curve, ModelError> {
        match self.hidden_act.as_deref() {
            None | Some("gelu") => Ok(Curve::Gelu),
            Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Curve::GeluTanh),
            Some("relu") => Ok(Curve::Relu),
            Some("silu" | "swish") => Ok(Curve::Silu),
            Some(other) => Err(unsupported("hidden_act", other, "gelu, gelu_new, relu and silu are")),
        }
    }

    /// True if the model scores pairs of texts; false if it makes vectors.
    fn scores(&self) -> Result<bool, ModelError> {
        let Some(class) = self.architectures.as_ref().and_then(|all| all.first()) else { return Ok(false) };
        if class.ends_with("ForSequenceClassification") {
            let labels = self.id2label.as_ref().map(Map::len).or(self.num_labels).unwrap_or(2);
            return match labels {
                1 => Ok(true),
                labels => {
                    let supported = "rerankers, which have one, and models for embeddings are";
                    Err(unsupported("id2label", &format!("{labels} labels"), supported))
                }
            };
        }
        let makes_vectors = ["Model", "ForMaskedLM", "ForPreTraining"].iter().any(|end| class.ends_with(end));
        if makes_vectors {
            return Ok(false);
        }
        let supported = "models for embeddings (…Model) and rerankers (…ForSequenceClassification) are";
        Err(unsupported("architectures", class, supported))
    }
}

pub(super) fn unsupported(field: &'static str, value: &str, supported: &str) -> ModelError {
    ModelError::Unsupported { field, value: format!("{value:?}"), supported: supported.to_owned() }
}

/// The spec of an encoder. Other files say how hidden states become a vector ([`crate::sentence`]).
pub(super) fn spec(config: &Value, family: &Family, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    let config = Config::deserialize(config).map_err(|error| malformed(error.to_string()))?;
    config.check().map_err(malformed)?;
    if let Some(other) = config.position_embedding_type.as_deref().filter(|of| *of != "absolute") {
        return Err(unsupported("position_embedding_type", other, "\"absolute\" is"));
    }
    if config.is_decoder {
        return Err(unsupported("is_decoder", "true", "encoders are"));
    }
    let first = match family.after_padding {
        true => config.pad_token_id.unwrap_or(1) + 1,
        false => 0,
    };
    let rows = config.max_position_embeddings;
    if rows <= first {
        return Err(malformed(format!("max_position_embeddings is {rows}, but positions begin at {first}")));
    }
    let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
    let attention = AttentionShape { qkv_bias: true, out_bias: true, ..to_all_tokens(heads, hidden / heads) };
    let mlp =
        MlpShape { channels: config.intermediate_size, bias: true, activation: None, curve: config.curve()? };
    let layer = LayerSpec {
        mixer: MixerSpec::Attention(attention),
        feed_forward: FeedForwardSpec::Mlp(mlp),
        norms: Norms::Sum,
        scaled: false,
    };
    let scores = config.scores()?;
    let dense = |from, outputs, curve| DenseShape { from, inputs: hidden, outputs, bias: true, curve };
    let encoder = EncoderSpec {
        positions: Some(PositionsShape { rows, first }),
        types: config.type_vocab_size,
        embedding_norm: EmbeddingNorm::Biased,
        output_norm: false,
        // Classifiers use the first token's.
        pooling: if scores { Pooling::FirstToken } else { Pooling::Mean },
        dense: match scores {
            true => vec![
                dense(DenseFrom::Pooler, hidden, Some(Curve::Tanh)),
                dense(DenseFrom::Classifier, 1, None),
            ],
            false => Vec::new(),
        },
        scores,
    };
    Ok(ModelSpec {
        hidden,
        vocab: config.vocab_size,
        context: rows - first,
        norm_eps: config.layer_norm_eps,
        layers: vec![layer; config.num_hidden_layers],
        ..without_layers(family.name, encoder)
    })
}

/// Attention of every token to all others, without biases and rotations.
pub(super) fn to_all_tokens(heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads: heads,
        head_dim,
        value_dim: head_dim,
        value_scale: 1.0,
        qkv_bias: false,
        out_bias: false,
        qk_norm: None,
        value_norm: false,
        values_are_keys: false,
        scale: 1.0 / (head_dim as f32).sqrt(),
        output_gate: false,
        head_gates: false,
        window: None,
        rope: None,
        sinks: false,
        temperature: None,
        scoring: Scoring { after: usize::MAX, ..Scoring::default() },
        keys_of: None,
    }
}

/// The part that all encoders share; the caller sets sizes, layers and rotations.
pub(super) fn without_layers(family: &str, encoder: EncoderSpec) -> ModelSpec {
    ModelSpec {
        family: family.to_owned(),
        hidden: 0,
        vocab: 0,
        context: 0,
        streams: None,
        engram: None,
        layer_inputs: None,
        norm_eps: 0.0,
        norms_less_one: false,
        centered: false,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        logit_cap: None,
        tied: Some(true),
        residual_block: None,
        encoder: Some(encoder),
        ropes: Vec::new(),
        layers: Vec::new(),
        ahead: None,
        further: 0,
        eos: Vec::new(),
    }
}
