//! The tensors of a model, and the bytes that each is filled with.

use half::bf16;
use safetensors::tensor::Dtype;

use super::random;
use crate::spec::{AttentionShape, DeltaShape, FeedForwardSpec, LatentShape, MixerSpec, ModelSpec};

/// Bits and group of affine quantization; `None`: bf16.
pub(super) type Quantization = Option<(u32, usize)>;

/// A tensor to be written.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    content: Content,
    /// Which stream of random numbers fills it.
    stream: u64,
}

/// What a tensor is filled with.
#[derive(Debug, Clone, Copy)]
enum Content {
    /// Random bits: quantized elements of any width.
    Bits,
    Ones,
    Normal {
        deviation: f32,
    },
    /// Steps between quantized values, from 3/4 to 5/4 of this one.
    Scales {
        step: f32,
    },
    /// What centres the values of a group, whose scale is drawn from the same stream.
    Biases {
        step: f32,
        bits: u32,
    },
}

impl Tensor {
    /// Bytes in the file.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * if self.dtype == Dtype::U32 { 4 } else { 2 }
    }

    /// What writes its bytes, piece after piece.
    pub(super) fn filler(&self) -> Filler {
        let value = |index: usize| match self.content {
            Content::Bits => None,
            Content::Ones => Some(1.0),
            Content::Normal { deviation } => Some(deviation * random::normal(index as u64)),
            Content::Scales { step } => Some(scale(step, index)),
            Content::Biases { step, bits } => {
                let scale = bf16::from_f32(scale(step, index)).to_f32();
                Some(-scale * ((1u32 << bits) - 1) as f32 / 2.0)
            }
        };
        let table = (0..TABLE).map_while(value).map(|value| bf16::from_f32(value).to_bits()).collect();
        Filler { stream: self.stream, word: 0, table }
    }
}

fn scale(step: f32, index: usize) -> f32 {
    step * (0.75 + 0.5 * index as f32 / (TABLE - 1) as f32)
}

/// Different values of a bf16 tensor: enough to look random, few enough for the first-level cache.
const TABLE: usize = 4096;

/// Makes the bytes of one tensor, in order.
pub(super) struct Filler {
    stream: u64,
    /// Words of 8 bytes made so far.
    word: u64,
    /// What bf16 values are drawn from; empty for random bits.
    table: Vec<u16>,
}

impl Filler {
    /// Fills the next piece. All but the last have whole words of 8 bytes.
    pub(super) fn fill(&mut self, piece: &mut [u8]) {
        let first = self.word;
        self.word += piece.len().div_ceil(8) as u64;
        let (words, rest) = piece.as_chunks_mut::<8>();
        let end = first + words.len() as u64;
        // Two loops, so that neither asks for each word which it is.
        if self.table.is_empty() {
            for (word, index) in words.iter_mut().zip(first..) {
                *word = random::word(self.stream, index).to_le_bytes();
            }
            rest.copy_from_slice(&random::word(self.stream, end).to_le_bytes()[..rest.len()]);
        } else {
            for (word, index) in words.iter_mut().zip(first..) {
                *word = self.pick(index);
            }
            rest.copy_from_slice(&self.pick(end)[..rest.len()]);
        }
    }

    fn pick(&self, index: u64) -> [u8; 8] {
        let random = random::word(self.stream, index);
        let mut word = 0;
        for shift in [0, 16, 32, 48] {
            word |= u64::from(self.table[(random >> shift) as usize % TABLE]) << shift;
        }
        word.to_le_bytes()
    }
}

/// All tensors, in the order in which a model reads them.
pub(super) fn tensors(spec: &ModelSpec, quantization: Quantization, seed: u64) -> Vec<Tensor> {
    let mut list = List { tensors: Vec::new(), quantization, seed };
    list.matrix("model.embed_tokens", spec.vocab, spec.hidden);
    for (index, layer) in spec.layers.iter().enumerate() {
        let inside = |name: &str| format!("model.layers.{index}.{name}");
        list.ones(inside("input_layernorm.weight"), spec.hidden);
        match &layer.mixer {
            MixerSpec::Attention(shape) => list.attention(&inside, shape, spec.hidden),
            MixerSpec::Latent(shape) => list.latent(&inside, shape, spec.hidden),
            MixerSpec::Delta(shape) => list.delta(&inside, shape, spec.hidden),
        }
        list.ones(inside("post_attention_layernorm.weight"), spec.hidden);
        let FeedForwardSpec::Gated(mlp) = &layer.feed_forward;
        for (name, out, input) in [
            ("mlp.gate_proj", mlp.channels, spec.hidden),
            ("mlp.up_proj", mlp.channels, spec.hidden),
            ("mlp.down_proj", spec.hidden, mlp.channels),
        ] {
            list.matrix(&inside(name), out, input);
            list.bias(&inside(name), out, mlp.bias);
        }
    }
    list.ones("model.norm.weight".into(), spec.hidden);
    if spec.tied != Some(true) {
        list.matrix("lm_head", spec.vocab, spec.hidden);
    }
    list.tensors
}

/// The share of a product's variance that is kept from layer to layer; below one, so that no activation grows large.
const GAIN: f32 = 0.8;

/// Deviation of the biases of trained models' layers, roughly.
const BIAS_DEVIATION: f32 = 0.02;

struct List {
    tensors: Vec<Tensor>,
    quantization: Quantization,
    seed: u64,
}

impl List {
    fn push(&mut self, name: String, dtype: Dtype, shape: Vec<usize>, content: Content, stream: u64) {
        self.tensors.push(Tensor { name, dtype, shape, content, stream });
    }

    /// A stream of its own for the next tensor.
    fn stream(&self) -> u64 {
        random::word(self.seed, self.tensors.len() as u64)
    }

    fn attention(&mut self, inside: &dyn Fn(&str) -> String, shape: &AttentionShape, hidden: usize) {
        let dim = shape.head_dim;
        for (name, heads) in [("q_proj", shape.heads), ("k_proj", shape.kv_heads), ("v_proj", shape.kv_heads)]
        {
            let path = inside(&format!("self_attn.{name}"));
            self.matrix(&path, heads * dim, hidden);
            self.bias(&path, heads * dim, shape.qkv_bias);
        }
        if shape.qk_norm {
            self.ones(inside("self_attn.q_norm.weight"), dim);
            self.ones(inside("self_attn.k_norm.weight"), dim);
        }
        self.matrix(&inside("self_attn.o_proj"), hidden, shape.heads * dim);
        self.bias(&inside("self_attn.o_proj"), hidden, shape.out_bias);
    }

    fn latent(&mut self, inside: &dyn Fn(&str) -> String, shape: &LatentShape, hidden: usize) {
        let queries = shape.heads * shape.query_dim();
        match shape.query_rank {
            Some(rank) => {
                self.matrix(&inside("self_attn.q_a_proj"), rank, hidden);
                self.ones(inside("self_attn.q_a_layernorm.weight"), rank);
                self.matrix(&inside("self_attn.q_b_proj"), queries, rank);
            }
            None => self.matrix(&inside("self_attn.q_proj"), queries, hidden),
        }
        self.matrix(&inside("self_attn.kv_a_proj_with_mqa"), shape.rank + shape.rotated, hidden);
        self.ones(inside("self_attn.kv_a_layernorm.weight"), shape.rank);
        let up = shape.heads * (shape.plain + shape.value_dim);
        self.matrix(&inside("self_attn.kv_b_proj"), up, shape.rank);
        self.matrix(&inside("self_attn.o_proj"), hidden, shape.heads * shape.value_dim);
    }

    fn delta(&mut self, inside: &dyn Fn(&str) -> String, shape: &DeltaShape, hidden: usize) {
        let values = shape.value_heads * shape.value_dim;
        for (name, outputs) in [
            ("in_proj_qkv", shape.channels()),
            ("in_proj_z", values),
            ("in_proj_b", shape.value_heads),
            ("in_proj_a", shape.value_heads),
        ] {
            self.matrix(&inside(&format!("linear_attn.{name}")), outputs, hidden);
        }
        let deviation = 1.0 / (shape.kernel as f32).sqrt();
        self.push(
            inside("linear_attn.conv1d.weight"),
            Dtype::BF16,
            vec![shape.channels(), 1, shape.kernel],
            Content::Normal { deviation },
            self.stream(),
        );
        for name in ["linear_attn.A_log", "linear_attn.dt_bias"] {
            let content = Content::Normal { deviation: 1.0 };
            self.push(inside(name), Dtype::BF16, vec![shape.value_heads], content, self.stream());
        }
        self.ones(inside("linear_attn.norm.weight"), shape.value_dim);
        self.matrix(&inside("linear_attn.out_proj"), hidden, values);
    }

    fn ones(&mut self, name: String, len: usize) {
        self.push(name, Dtype::BF16, vec![len], Content::Ones, 0);
    }

    fn bias(&mut self, path: &str, len: usize, present: bool) {
        if present {
            let content = Content::Normal { deviation: BIAS_DEVIATION };
            self.push(format!("{path}.bias"), Dtype::BF16, vec![len], content, self.stream());
        }
    }

    fn matrix(&mut self, path: &str, out: usize, input: usize) {
        let deviation = GAIN / (input as f32).sqrt();
        let weight = format!("{path}.weight");
        let Some((bits, group)) = self.quantization else {
            return self.push(
                weight,
                Dtype::BF16,
                vec![out, input],
                Content::Normal { deviation },
                self.stream(),
            );
        };
        let packed = vec![out, input * bits as usize / 32];
        self.push(weight, Dtype::U32, packed, Content::Bits, self.stream());
        // The integers 0..n have the variance (n² - 1) / 12.
        let step = deviation * (12.0 / ((1u64 << (2 * bits)) - 1) as f32).sqrt();
        let stream = self.stream();
        for (name, content) in
            [("scales", Content::Scales { step }), ("biases", Content::Biases { step, bits })]
        {
            self.push(format!("{path}.{name}"), Dtype::BF16, vec![out, input / group], content, stream);
        }
    }
}
