//! The built-in model as a GGUF file.

use std::path::Path;

use serde_json::Value;
use thunder_compute::reference::dequantize;
use thunder_model::ModelFolder;
use thunder_model::spec::MixerSpec;
use thunder_model::weights::{LayerRole, Role};
use thunder_testing::gguf::Gguf;

/// The number of F32.
const F32: u32 = 0;
/// `intermediate_size` of the built-in model.
const CHANNELS: usize = 1024;

/// Writes the built-in model as a GGUF file, with its weights in f32.
pub fn convert(path: &Path) {
    let source = thunder_testing::builtin_model();
    let folder = ModelFolder::open(&source).unwrap();
    let (spec, weights) = (&folder.spec, &*folder.weights);
    let MixerSpec::Attention(attention) = &spec.layers[0].mixer else { panic!("it has attention") };
    let mut file = with_tokenizer(&source)
        .text("general.architecture", "qwen3")
        .number("qwen3.block_count", spec.layers.len() as u32)
        .number("qwen3.context_length", spec.context as u32)
        .number("qwen3.embedding_length", spec.hidden as u32)
        .number("qwen3.feed_forward_length", CHANNELS as u32)
        .number("qwen3.attention.head_count", attention.heads as u32)
        .number("qwen3.attention.head_count_kv", attention.kv_heads as u32)
        .number("qwen3.attention.key_length", attention.head_dim as u32)
        .float("qwen3.attention.layer_norm_rms_epsilon", spec.norm_eps)
        .float("qwen3.rope.freq_base", 1e4);
    let matrix = |role: Role, rows: usize, cols: usize| -> Vec<f32> {
        let stored = weights.matrix(role, [rows, cols]).unwrap();
        dequantize(&stored.window(0..rows, 0..cols)).concat()
    };
    let vector = |role: Role, len: usize| weights.vector(role, &[len]).unwrap();
    let (hidden, dim) = (spec.hidden, attention.head_dim);
    let (queries, keys) = (attention.heads * dim, attention.kv_heads * dim);
    let mut add = |name: &str, rows: usize, cols: usize, values: Vec<f32>| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dimensions = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
        file = std::mem::take(&mut file).tensor(&format!("{name}.weight"), &dimensions, F32, bytes);
    };
    add("token_embd", spec.vocab, hidden, matrix(Role::Embedding, spec.vocab, hidden));
    add("output_norm", 1, hidden, vector(Role::OutputNorm, hidden));
    for layer in 0..spec.layers.len() {
        for (name, role, rows, cols) in [
            ("attn_q", LayerRole::Query, queries, hidden),
            ("attn_k", LayerRole::Key, keys, hidden),
            ("attn_v", LayerRole::Value, keys, hidden),
            ("attn_output", LayerRole::AttentionOut, hidden, queries),
            ("ffn_gate", LayerRole::Gate, CHANNELS, hidden),
            ("ffn_up", LayerRole::Up, CHANNELS, hidden),
            ("ffn_down", LayerRole::Down, hidden, CHANNELS),
        ] {
            add(&format!("blk.{layer}.{name}"), rows, cols, matrix(role.of(layer), rows, cols));
        }
        for (name, role, len) in [
            ("attn_norm", LayerRole::MixerNorm, hidden),
            ("ffn_norm", LayerRole::FeedForwardNorm, hidden),
            ("attn_q_norm", LayerRole::QueryNorm, dim),
            ("attn_k_norm", LayerRole::KeyNorm, dim),
        ] {
            add(&format!("blk.{layer}.{name}"), 1, len, vector(role.of(layer), len));
        }
    }
    std::fs::write(path, file.bytes()).unwrap();
}

/// The built-in model's tokenizer and chat template.
pub fn with_tokenizer(source: &Path) -> Gguf {
    let read = |name: &str| std::fs::read_to_string(source.join(name)).unwrap();
    let tokenizer: Value = serde_json::from_str(&read("tokenizer.json")).unwrap();
    let mut tokens: Vec<(&str, u64)> = tokenizer["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(text, id)| (text.as_str(), id.as_u64().unwrap()))
        .collect();
    tokens.sort_by_key(|(_, id)| *id);
    let texts: Vec<&str> = tokens.iter().map(|(text, _)| *text).collect();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let is_added = |text: &&str| added.iter().any(|token| token["content"] == **text);
    let types: Vec<i32> = texts.iter().map(|text| if is_added(text) { 3 } else { 1 }).collect();
    let merges: Vec<String> = tokenizer["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|merge| format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()))
        .collect();
    Gguf::default()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "gpt-2")
        .texts("tokenizer.ggml.tokens", &texts)
        .numbers("tokenizer.ggml.token_type", &types)
        .texts("tokenizer.ggml.merges", &merges)
        .number("tokenizer.ggml.eos_token_id", 2)
        .text("tokenizer.chat_template", &read("chat_template.jinja"))
}
