//! A file's metadata in config.json's words. A family of architectures is a row of [`FAMILIES`].

use serde_json::{Map, Value, json};
use thunder_compute::Float;

use super::files::GgufFiles;
use super::values::Metadata;
use crate::arch;
use crate::error::ModelError;
use crate::spec::{FeedForwardSpec, MixerSpec, ModelSpec};

/// How an architecture of GGUF is called in config.json, and what it leaves unsaid.
#[derive(Debug)]
pub(super) struct Family {
    /// `general.architecture`.
    architecture: &'static str,
    /// The family of files with experts; GGUF may use one name for both.
    experts: bool,
    /// config.json's `model_type`.
    model_type: &'static str,
    /// Rows of query and key heads are stored in pairs, as rotations of neighbours need them.
    pub paired_heads: bool,
    /// Keys after the architecture's name, and their fields, in addition to [`KEYS`].
    keys: &'static [(&'static str, &'static str)],
}

const fn dense(architecture: &'static str, model_type: &'static str, paired_heads: bool) -> Family {
    Family { architecture, experts: false, model_type, paired_heads, keys: &[] }
}

const FAMILIES: [Family; 4] = [
    // Llama 2 and 3, and Mistral, which GGUF does not tell from Llama.
    dense("llama", "llama", true),
    dense("mistral3", "ministral3", true),
    dense("qwen2", "qwen2", false),
    dense("qwen3", "qwen3", false),
];

/// Keys that every family has, and whether a file must have them.
const KEYS: [(&str, &str, bool); 7] = [
    ("embedding_length", "hidden_size", true),
    ("feed_forward_length", "intermediate_size", true),
    ("block_count", "num_hidden_layers", true),
    ("attention.head_count", "num_attention_heads", true),
    ("attention.head_count_kv", "num_key_value_heads", false),
    ("attention.key_length", "head_dim", false),
    ("context_length", "max_position_embeddings", true),
];

/// Keys of rotary scaling, and their fields.
const SCALING_KEYS: [(&str, &str); 6] = [
    ("rope.scaling.factor", "factor"),
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ("rope.scaling.yarn_attn_factor", "attention_factor"),
    ("rope.scaling.yarn_log_multiplier", "mscale_all_dim"),
    ("attention.temperature_scale", "llama_4_scaling_beta"),
];

/// Divisors of the rotary frequencies, which Llama 3.1 files have.
const ROTARY_DIVISORS: &str = "rope_freqs.weight";

/// Reads the architecture.
///
/// # Errors
/// When it is unknown, or a key is missing, of another type, or unsupported.
pub(crate) fn spec(files: &GgufFiles) -> Result<ModelSpec, ModelError> {
    let config = config(files).map_err(|reason| files.malformed(reason))?;
    let mut spec = arch::spec(&config, files.path())?;
    take_rotary_divisors(files, &mut spec)?;
    take_biases(files, &mut spec);
    Ok(spec)
}

/// The family of a file.
pub(super) fn family(files: &GgufFiles) -> Result<&'static Family, String> {
    let metadata = files.metadata();
    let name = metadata.text("general.architecture")?.ok_or("it has no general.architecture")?;
    let experts = metadata.unsigned(&format!("{name}.expert_count"))?.unwrap_or(0) > 0;
    let found = FAMILIES.iter().find(|family| family.architecture == name && family.experts == experts);
    found.ok_or_else(|| {
        let mut known: Vec<_> = FAMILIES.iter().map(described).collect();
        known.dedup();
        let with = if experts { " with experts" } else { "" };
        format!("its architecture, {name:?}{with}, is not supported: {} are", known.join(", "))
    })
}

fn described(family: &Family) -> String {
    format!("{}{}", family.architecture, if family.experts { " with experts" } else { "" })
}

/// The config.json that the metadata amounts to.
fn config(files: &GgufFiles) -> Result<Value, String> {
    let (metadata, family) = (files.metadata(), family(files)?);
    let key = |suffix: &str| format!("{}.{suffix}", family.architecture);
    let mut config = Map::new();
    config.insert("model_type".into(), family.model_type.into());
    for (suffix, field, required) in KEYS {
        match metadata.same_everywhere(&key(suffix))? {
            Some(number) => drop(config.insert(field.into(), number.into())),
            None if required => return Err(format!("it has no {}", key(suffix))),
            None => {}
        }
    }
    for (suffix, field) in family.keys {
        if let Some(number) = metadata.same_everywhere(&key(suffix))? {
            config.insert((*field).into(), number.into());
        }
    }
    for (suffix, field) in
        [("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("rope.freq_base", "rope_theta")]
    {
        if let Some(number) = metadata.float(&key(suffix))? {
            config.insert(field.into(), json!(number));
        }
    }
    let table = "token_embd.weight";
    let (embedding, _) = files.tensor(table).ok_or_else(|| format!("it has no tensor {table:?}"))?;
    config.insert("vocab_size".into(), embedding.dimensions.get(1).copied().unwrap_or(1).into());
    check_heads(metadata, &key, &mut config)?;
    if let Some(scaling) = scaling(metadata, &key)? {
        config.insert("rope_scaling".into(), scaling);
    }
    Ok(config.into())
}

/// Widths of keys, values and their rotated part.
fn check_heads(
    metadata: Metadata<'_>,
    key: &dyn Fn(&str) -> String,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let number = |config: &Map<String, Value>, field: &str| config.get(field).and_then(Value::as_u64);
    let heads = number(config, "num_attention_heads").unwrap_or_default().max(1);
    let width = number(config, "head_dim")
        .unwrap_or_else(|| number(config, "hidden_size").unwrap_or_default() / heads);
    let values = metadata.unsigned(&key("attention.value_length"))?.unwrap_or(width);
    if values != width {
        let reason = format!(
            "{} is {values} and heads are {width} wide: different widths are not supported",
            key("attention.value_length")
        );
        return Err(reason);
    }
    if let Some(rotated) =
        metadata.unsigned(&key("rope.dimension_count"))?.filter(|rotated| *rotated != width)
    {
        config.insert("partial_rotary_factor".into(), json!(rotated as f64 / width.max(1) as f64));
    }
    Ok(())
}

/// `rope_scaling`, if the file has any.
fn scaling(metadata: Metadata<'_>, key: &dyn Fn(&str) -> String) -> Result<Option<Value>, String> {
    let kind = metadata.text(&key("rope.scaling.type"))?.filter(|kind| *kind != "none");
    // The name of linear scaling's factor in older files.
    let linear = metadata.float(&key("rope.scale_linear"))?.filter(|factor| *factor != 1.0);
    let kind = match (kind, linear) {
        (Some(kind), _) => kind,
        (None, Some(factor)) => return Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
        (None, None) => return Ok(None),
    };
    let mut scaling = Map::new();
    scaling.insert("rope_type".into(), kind.into());
    for (suffix, field) in SCALING_KEYS {
        if let Some(number) = metadata.float(&key(suffix))? {
            scaling.insert(field.into(), json!(number));
        }
    }
    if let Some(original) = metadata.unsigned(&key("rope.scaling.original_context_length"))? {
        scaling.insert("original_max_position_embeddings".into(), original.into());
    }
    if scaling.contains_key("mscale_all_dim") {
        scaling.insert("mscale".into(), json!(1.0));
    }
    Ok(Some(scaling.into()))
}

/// Divides the rotary frequencies by the file's divisors.
fn take_rotary_divisors(files: &GgufFiles, spec: &mut ModelSpec) -> Result<(), ModelError> {
    let Some((info, bytes)) = files.tensor(ROTARY_DIVISORS) else { return Ok(()) };
    for rope in &mut spec.ropes {
        let frequencies = &mut rope.inverse_frequencies;
        let expected = vec![frequencies.len()];
        if info.dimensions != expected || info.kind.name != "F32" {
            return Err(ModelError::Shape {
                name: ROTARY_DIVISORS.into(),
                actual: format!("{} {:?}", info.kind.name, info.dimensions),
                expected: format!("F32 {expected:?}"),
            });
        }
        let mut divisors = vec![0.0; frequencies.len()];
        Float::F32.decode(bytes, &mut divisors);
        if let Some(divisor) = divisors.iter().find(|divisor| !divisor.is_normal()) {
            return Err(
                files.malformed(format!("{ROTARY_DIVISORS} holds {divisor}: frequencies are divided by it"))
            );
        }
        frequencies.iter_mut().zip(&divisors).for_each(|(frequency, divisor)| *frequency /= divisor);
    }
    Ok(())
}

/// The metadata does not say which projections have biases; the tensors do.
fn take_biases(files: &GgufFiles, spec: &mut ModelSpec) {
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let has = |name: &str| files.tensor(&format!("blk.{index}.{name}.bias")).is_some();
        if let MixerSpec::Attention(attention) = &mut layer.mixer {
            attention.qkv_bias = has("attn_q");
            attention.out_bias = has("attn_output");
        }
        if let FeedForwardSpec::Gated(gated) = &mut layer.feed_forward {
            gated.bias = has("ffn_gate");
        }
    }
}
