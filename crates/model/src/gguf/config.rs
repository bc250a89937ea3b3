//! A file's metadata in config.json's words. A family of architectures is a row of
//! [`FAMILIES`].

mod convolutions;
mod delta;
mod families;
mod global_heads;
mod hybrid;
mod mixture;
mod streams;
mod window_heads;

use serde_json::{Map, Value, json};
use thunder_compute::Float;

use super::files::GgufFiles;
use super::values::{Metadata, Value as Stored};
use crate::arch;
use crate::error::ModelError;
use crate::spec::{Correction, FeedForwardSpec, MixerSpec, ModelSpec};
pub(super) use families::Family;
pub(super) use families::StateSpaces;
use families::{Delta, FAMILIES, Norm};

/// A key's whole name from what follows the architecture's.
type Key<'a> = dyn Fn(&str) -> String + 'a;

/// Keys that every family has, and whether a file must have them.
const KEYS: [(&str, &str, bool); 7] = [
    ("embedding_length", "hidden_size", true),
    ("feed_forward_length", "intermediate_size", false),
    ("block_count", "num_hidden_layers", true),
    ("attention.head_count", "num_attention_heads", true),
    ("attention.head_count_kv", "num_key_value_heads", false),
    ("attention.key_length", "head_dim", false),
    ("context_length", "max_position_embeddings", true),
];

/// Numbers, and their fields.
const FLOATS: [(&str, &str); 4] = [
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
];

/// Factors and limits that few families have, and their fields. 0 stands for none.
const FACTORS: [(&str, &str); 5] = [
    ("attention.scale", "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];

/// Layers that a file may have: lists are made of them before any weight is read.
const MOST_LAYERS: u64 = 1 << 12;

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
    let family = family(files).map_err(|reason| files.malformed(reason))?;
    take_rotary_divisors(files, family, &mut spec)?;
    take_biases(files, family, &mut spec);
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
        if family.has_own(suffix) {
            continue;
        }
        match metadata.same_everywhere(&key(suffix))? {
            Some(number) => drop(config.insert(field.into(), number.into())),
            None if required => return Err(format!("it has no {}", key(suffix))),
            None => {}
        }
    }
    for (suffix, field) in FLOATS {
        if let Some(number) = metadata.float(&key(suffix))? {
            config.insert(field.into(), json!(number));
        }
    }
    for (suffix, field) in FACTORS {
        if let Some(number) = metadata.float(&key(suffix))?.filter(|number| *number != 0.0) {
            config.insert(field.into(), json!(number));
        }
    }
    if let (Some(field), Some(number)) = (family.logit_scale, metadata.float(&key("logit_scale"))?) {
        config.insert(field.into(), json!(number));
    }
    // Files before 2025 leave them unsaid.
    let factors = ["embedding_scale", "residual_scale", "logit_scale"];
    for suffix in factors.into_iter().filter(|_| family.model_type == "minicpm") {
        if metadata.float(&key(suffix))?.is_none() {
            return Err(format!("it has no {}: convert the model again with a newer llama.cpp", key(suffix)));
        }
    }
    let table = "token_embd.weight";
    let (embedding, _) = files.tensor(table).ok_or_else(|| format!("it has no tensor {table:?}"))?;
    config.insert("vocab_size".into(), embedding.dimensions.get(1).copied().unwrap_or(1).into());
    let has = |name: &str| files.tensors().any(|(tensor, ..)| tensor.ends_with(name));
    if family.experts {
        let corrected = has(".exp_probs_b.bias") || has(".exp_probs_b");
        mixture::take_experts(metadata, family, &key, corrected, &mut config)?;
    }
    match (family.latent, family.global_heads) {
        (true, _) => mixture::take_latent(metadata, family, &key, &mut config)?,
        (_, true) => {}
        _ => take_heads(metadata, family, &key, &mut config)?,
    }
    if family.indexer {
        mixture::take_indexer(metadata, family, &key, &mut config)?;
    }
    if family.architecture == "deepseek2"
        && family.experts
        && config.get("scoring_func") != Some(&json!("sigmoid"))
    {
        config.insert("model_type".into(), "deepseek_v2".into());
    }
    // Some sizes of these families have such norms.
    match family.norm {
        Norm::AsFamily => {}
        Norm::IfStored => drop(config.insert("use_qk_norm".into(), has(".attn_q_norm.weight").into())),
        // Llama 4's have no weights. Maverick, with its 128 experts, has none.
        Norm::UnlessMaverick => {
            let experts = config.remove("num_experts").unwrap_or_default();
            config.insert("use_qk_norm".into(), (experts != json!(128)).into());
            // In Llama 4's own words, since it has a default.
            config.insert("num_local_experts".into(), experts);
        }
    }
    if let Some(layers) = family.wide_scale_layers {
        take_score_scale(layers, &mut config);
    }
    if family.state_spaces != StateSpaces::None {
        hybrid::take(metadata, family.state_spaces, &key, &has_in_layer(files), &mut config)?;
    }
    if family.finetuned_rotates && metadata.bool(&key("rope.scaling.finetuned"))? == Some(false) {
        config.insert("no_rope_layer_interval".into(), 1.into());
    }
    if family.global_heads {
        global_heads::take_channels(metadata, &key, &mut config)?;
    }
    if !config.contains_key("intermediate_size") {
        let channels = config.get("moe_intermediate_size").cloned();
        let channels = channels.ok_or_else(|| format!("it has no {}", key("feed_forward_length")))?;
        config.insert("intermediate_size".into(), channels);
    }
    take_layers(metadata, family, &key, &mut config)?;
    take_unusual_layers(files, family, &key, &mut config)?;
    take_long_rope(files, &key, &mut config)?;
    let is_long = config.contains_key("rope_scaling");
    if let Some(scaling) = scaling(metadata, family, &key)?.filter(|_| !is_long) {
        config.insert("rope_scaling".into(), scaling);
    }
    Ok(config.into())
}

/// What few families' layers have: states, several streams, other heads in some layers.
fn take_unusual_layers(
    files: &GgufFiles,
    family: &Family,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let (metadata, has) = (files.metadata(), has_in_layer(files));
    match family.delta {
        Delta::None => {}
        Delta::Gated(_) => delta::take_gated(metadata, key, config)?,
        Delta::Channels => delta::take_channels(metadata, key, &has, config)?,
    }
    if family.experts && !config.contains_key("first_k_dense_replace") {
        mixture::take_first_experts(&has, config);
    }
    if family.streams {
        streams::take(metadata, key, config)?;
        match family.compressed {
            true => streams::take_deepseek4(metadata, key, config)?,
            false => streams::take_glm53(metadata, key, config)?,
        }
    }
    if family.window_heads {
        window_heads::take(metadata, key, &has, config)?;
    }
    if family.convolutions {
        convolutions::take(metadata, key, &has, config)?;
    }
    if family.global_heads {
        global_heads::take(metadata, key, &has, config)?;
        config.insert("enable_moe_block".into(), family.experts.into());
    }
    Ok(())
}

/// Whether a layer has a tensor, by what follows its number.
fn has_in_layer(files: &GgufFiles) -> impl Fn(u64, &str) -> bool {
    move |layer, name| files.tensor(&format!("blk.{layer}.{name}")).is_some()
}

/// What Gemma's scores are divided by: the width of heads, or in the largest model, which has
/// `layers`, the residual stream's share of a head (llama.cpp's gemma2.cpp and gemma3.cpp).
fn take_score_scale(layers: u64, config: &mut Map<String, Value>) {
    let number = |field: &str| config.get(field).and_then(Value::as_u64);
    let (hidden, heads) =
        (number("hidden_size").unwrap_or(1), number("num_attention_heads").unwrap_or(1).max(1));
    let scalar = match number("num_hidden_layers") == Some(layers) {
        true => hidden / heads,
        false => number("head_dim").unwrap_or(hidden / heads),
    };
    config.insert("query_pre_attn_scalar".into(), scalar.into());
}

/// Phi's divisors of rotary frequencies, which are tensors.
fn take_long_rope(files: &GgufFiles, key: &Key<'_>, config: &mut Map<String, Value>) -> Result<(), String> {
    let divisors = |name: &str| -> Result<Option<Vec<f64>>, String> {
        let Some((info, bytes)) = files.tensor(&format!("{name}.weight")) else { return Ok(None) };
        let [len] = info.dimensions[..] else { return Err(format!("{name}.weight is no list")) };
        if info.kind.name != "F32" {
            return Err(format!("{name}.weight is {}: F32 is supported", info.kind.name));
        }
        let mut numbers = vec![1.0; len];
        if files.files.note(bytes) {
            Float::F32.decode(bytes, &mut numbers);
        }
        Ok(Some(numbers.into_iter().map(f64::from).collect()))
    };
    let (Some(long), Some(short)) = (divisors("rope_factors_long")?, divisors("rope_factors_short")?) else {
        return Ok(());
    };
    let metadata = files.metadata();
    let mut scaling = json!({ "rope_type": "longrope", "long_factor": long, "short_factor": short });
    if let Some(factor) = metadata.float(&key("rope.scaling.attn_factor"))?.filter(|factor| *factor != 0.0) {
        scaling["attention_factor"] = json!(factor);
    }
    if let Some(original) = metadata.unsigned(&key("rope.scaling.original_context_length"))? {
        config.insert("original_max_position_embeddings".into(), original.into());
    }
    config.insert("rope_scaling".into(), scaling);
    Ok(())
}

/// The number of layers, and what differs from layer to layer: windows and rotations.
fn take_layers(
    metadata: Metadata<'_>,
    family: &Family,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let all = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or_default();
    // Layers that predict further tokens are among them.
    let further = metadata.unsigned(&key("nextn_predict_layers"))?.unwrap_or(0);
    let layers = all.checked_sub(further).filter(|layers| (1..=MOST_LAYERS).contains(layers));
    let layers = layers.ok_or_else(|| {
        let counts = format!("{} is {all}", key("block_count"));
        format!("{counts}, of which {further} predict further tokens: 1 to {MOST_LAYERS} must be left")
    })?;
    config.insert("num_hidden_layers".into(), layers.into());
    config.insert("num_nextn_predict_layers".into(), further.into());
    if family.unrotated_every > 0 {
        let rotates = |layer: u64| u8::from(!(layer + 1).is_multiple_of(family.unrotated_every as u64));
        config.insert("no_rope_layers".into(), (0..layers).map(rotates).collect());
    }
    if let Some(rotates) = metadata.numbers(&key("attention.rope_pattern"))? {
        config.insert("no_rope_layers".into(), rotates.map(|item| u8::from(is_set(&item))).collect());
    }
    let window = metadata.unsigned(&key("attention.sliding_window"))?.filter(|window| *window > 0);
    let Some(window) = window else { return Ok(()) };
    config.insert("sliding_window".into(), window.into());
    config.insert("use_sliding_window".into(), true.into());
    let name = key("attention.sliding_window_pattern");
    let slides: Vec<bool> = match metadata.numbers(&name).ok().flatten() {
        Some(list) if list.len() as u64 >= layers => {
            list.take(layers as usize).map(|item| is_set(&item)).collect()
        }
        Some(list) => return Err(format!("{name} has {} items for {layers} layers", list.len())),
        None => {
            let every = match metadata.unsigned(&name)? {
                None => family.full_every.map_or(0, |every| every as u64),
                Some(every) => every,
            };
            (0..layers).map(|layer| every == 0 || layer % every < every - 1).collect()
        }
    };
    let kind = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
    config.insert("layer_types".into(), slides.into_iter().map(kind).collect());
    Ok(())
}

/// True for what stands for a layer that has something.
const fn is_set(item: &Stored) -> bool {
    matches!(item, Stored::Bool(true) | Stored::Unsigned(1..) | Stored::Signed(1..))
}

/// Widths of keys, values and their rotated part.
fn take_heads(
    metadata: Metadata<'_>,
    family: &Family,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let number = |config: &Map<String, Value>, field: &str| config.get(field).and_then(Value::as_u64);
    let heads = number(config, "num_attention_heads").unwrap_or_default().max(1);
    let width = number(config, "head_dim")
        .unwrap_or_else(|| number(config, "hidden_size").unwrap_or_default() / heads);
    let values = metadata.unsigned(&key("attention.value_length"))?.unwrap_or(width);
    if family.window_heads {
        config.insert("v_head_dim".into(), values.into());
    } else if values != width {
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
fn scaling(metadata: Metadata<'_>, family: &Family, key: &Key<'_>) -> Result<Option<Value>, String> {
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
    match scaling.get("mscale_all_dim").and_then(Value::as_f64) {
        // The file has a tenth of it. The model's `mscale` is the same number and not in the file.
        Some(tenth) if family.latent => {
            for field in ["mscale", "mscale_all_dim"] {
                scaling.insert(field.into(), json!(10.0 * tenth));
            }
        }
        Some(_) => drop(scaling.insert("mscale".into(), json!(1.0))),
        None => {}
    }
    // gpt-oss's ramp begins and ends between dimensions; the file does not say so.
    if family.model_type == "gpt_oss" {
        scaling.insert("truncate".into(), false.into());
    }
    Ok(Some(scaling.into()))
}

/// Divides the rotary frequencies by the file's divisors.
fn take_rotary_divisors(files: &GgufFiles, family: &Family, spec: &mut ModelSpec) -> Result<(), ModelError> {
    let Some((info, bytes)) = files.tensor(ROTARY_DIVISORS) else { return Ok(()) };
    // Gemma 4's are those of layers without a window, whose rotation is the first.
    let ropes = if family.global_heads { 1 } else { spec.ropes.len() };
    for rope in spec.ropes.iter_mut().take(ropes) {
        let frequencies = &mut rope.inverse_frequencies;
        let expected = vec![frequencies.len()];
        if info.dimensions != expected || info.kind.name != "F32" {
            return Err(ModelError::Shape {
                name: ROTARY_DIVISORS.into(),
                actual: format!("{} {:?}", info.kind.name, info.dimensions),
                expected: format!("F32 {expected:?}"),
            });
        }
        let mut divisors = vec![1.0; frequencies.len()];
        if files.files.note(bytes) {
            Float::F32.decode(bytes, &mut divisors);
        }
        if let Some(divisor) = divisors.iter().find(|divisor| !divisor.is_normal()) {
            return Err(
                files.malformed(format!("{ROTARY_DIVISORS} holds {divisor}: frequencies are divided by it"))
            );
        }
        frequencies.iter_mut().zip(&divisors).for_each(|(frequency, divisor)| *frequency /= divisor);
    }
    Ok(())
}

/// The metadata does not say which projections have biases, which routers a correction and which
/// layers a scale; the tensors do. The architecture says the order of value heads.
fn take_biases(files: &GgufFiles, family: &Family, spec: &mut ModelSpec) {
    let ahead = spec.ahead.as_mut().map(|ahead| &mut ahead.layer);
    for (index, layer) in spec.layers.iter_mut().chain(ahead).enumerate() {
        layer.scaled &= files.tensor(&format!("blk.{index}.layer_output_scale.weight")).is_some();
        let has = |name: &str| files.tensor(&format!("blk.{index}.{name}.bias")).is_some();
        match &mut layer.mixer {
            MixerSpec::Attention(attention) => {
                attention.qkv_bias = has("attn_q") || has("attn_qkv");
                attention.out_bias = has("attn_output");
            }
            MixerSpec::Delta(delta) if let Delta::Gated(sharing) = family.delta => delta.sharing = sharing,
            MixerSpec::StateSpace(space) => space.conv_bias = has("ssm_conv1d"),
            _ => {}
        }
        match &mut layer.feed_forward {
            FeedForwardSpec::None | FeedForwardSpec::Both(_) => {}
            FeedForwardSpec::Mlp(mlp) => mlp.bias = has("ffn_up"),
            FeedForwardSpec::Experts(experts) => {
                let bare = files.tensor(&format!("blk.{index}.exp_probs_b")).is_some();
                let has_correction = bare || has("exp_probs_b");
                experts.router.correction = if has_correction { Correction::Given } else { Correction::None };
            }
        }
    }
}
