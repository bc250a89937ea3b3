//! The tensors of an encoder, by BERT's names.

use super::List;
use crate::spec::{DenseFrom, EncoderSpec, FeedForwardSpec, MixerSpec, ModelSpec};

impl List {
    pub(super) fn encoder(&mut self, encoder: &EncoderSpec, spec: &ModelSpec) {
        let hidden = spec.hidden;
        self.matrix("embeddings.word_embeddings", spec.vocab, hidden);
        if let Some(positions) = encoder.positions {
            self.matrix("embeddings.position_embeddings", positions.rows, hidden);
        }
        if encoder.types > 0 {
            self.matrix("embeddings.token_type_embeddings", encoder.types, hidden);
        }
        self.layer_norm("embeddings.LayerNorm", hidden);
        for (index, layer) in spec.layers.iter().enumerate() {
            let mut biased = |name: &str, outputs, inputs| {
                let path = format!("encoder.layer.{index}.{name}");
                self.matrix(&path, outputs, inputs);
                self.bias(&path, outputs, true);
            };
            if let MixerSpec::Attention(shape) = &layer.mixer {
                for (name, heads) in
                    [("query", shape.heads), ("key", shape.kv_heads), ("value", shape.kv_heads)]
                {
                    biased(&format!("attention.self.{name}"), heads * shape.head_dim, hidden);
                }
                biased("attention.output.dense", hidden, shape.heads * shape.value_dim);
            }
            if let FeedForwardSpec::Mlp(shape) = &layer.feed_forward {
                biased("intermediate.dense", shape.channels, hidden);
                biased("output.dense", hidden, shape.channels);
            }
            for name in ["attention.output", "output"] {
                self.layer_norm(&format!("encoder.layer.{index}.{name}.LayerNorm"), hidden);
            }
        }
        for dense in &encoder.dense {
            let path = match dense.from {
                DenseFrom::Pooler => "classifier.dense",
                DenseFrom::Classifier => "classifier.out_proj",
                DenseFrom::Folder(_) => continue,
            };
            self.matrix(path, dense.outputs, dense.inputs);
            self.bias(path, dense.outputs, dense.bias);
        }
    }

    fn layer_norm(&mut self, path: &str, len: usize) {
        self.ones(format!("{path}.weight"), len);
        self.bias(path, len, true);
    }
}
