//! Bad model folders and the errors that they must give, and random folders, which must not panic.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use thunder_compute::KvFormat;
use thunder_model::model::shard_footprints;
use thunder_model::synth::{self, Shape};
use thunder_model::{ModelFolder, Parallelism, ShardPlan};

/// A good folder: quantized, in one weight file with an index.
fn good() -> &'static Path {
    static GOOD: OnceLock<TempDir> = OnceLock::new();
    let folder = GOOD.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let shape = Shape { layers: 2, vocab: 512, ..Shape::named("qwen3-tiny").expect("it is listed") };
        synth::write(&shape, Some(4), 64, folder.path(), 0, &mut |_, _| {}).expect("written");
        read(folder.path()).expect("it is good");
        folder
    });
    folder.path()
}

/// A copy of the good folder, to damage.
fn copy() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(good()).expect("a folder") {
        let path = entry.expect("a file").path();
        fs::copy(&path, folder.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    folder
}

/// Reads everything that is read before weights are packed.
fn read(folder: &Path) -> Result<(), Box<dyn Error>> {
    let folder = ModelFolder::open(folder)?;
    shard_footprints(
        &folder,
        &ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0])?,
        KvFormat::F16,
    )?;
    folder.tokenizer()?;
    folder.chat_template()?;
    Ok(())
}

fn remove(folder: &Path, name: &str) {
    fs::remove_file(folder.join(name)).expect("it was there");
}

fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.join(name), content).expect("written");
}

fn edit_json(folder: &Path, name: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
    let bytes = fs::read(folder.join(name)).expect("it was there");
    let mut value: Value = serde_json::from_slice(&bytes).expect("it was JSON");
    edit(value.as_object_mut().expect("it was an object"));
    write(folder, name, value.to_string());
}

/// Sets a field of config.json; null removes it.
fn config(folder: &Path, field: &str, value: Value) {
    edit_json(folder, "config.json", |config| match value {
        Value::Null => drop(config.remove(field)),
        value => drop(config.insert(field.to_owned(), value)),
    });
}

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Edits the header of the weight file.
fn edit_header(folder: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let bytes = fs::read(folder.join(WEIGHTS)).expect("weights");
    let (len, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    edit(header.as_object_mut().expect("an object"));
    write(folder, WEIGHTS, safetensors(header.to_string().as_bytes(), data));
}

fn safetensors(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// Sets a field of a tensor in the header.
fn edit_tensor(folder: &Path, name: &str, field: &str, value: Value) {
    edit_header(folder, |header| header[name][field] = value);
}

/// What is wrong, how to damage the folder, and what the error must contain.
type Case = (&'static str, fn(&Path), &'static [&'static str]);

const CASES: [Case; 62] = [
    (
        "no folder",
        |f| fs::remove_dir_all(f).expect("removed"),
        &["no such file", "needs config.json, weights"],
    ),
    ("no config.json", |f| remove(f, "config.json"), &["config.json: no such file"]),
    (
        "config.json is a folder",
        |f| {
            remove(f, "config.json");
            fs::create_dir(f.join("config.json")).expect("created");
        },
        &["config.json", "directory"],
    ),
    (
        "config.json is not JSON",
        |f| write(f, "config.json", "{\"model_type\": "),
        &["config.json: EOF while parsing"],
    ),
    ("config.json is empty", |f| write(f, "config.json", ""), &["config.json: EOF while parsing"]),
    ("config.json is no object", |f| write(f, "config.json", "[1]"), &["config.json: not a JSON object"]),
    ("no model_type", |f| config(f, "model_type", Value::Null), &["config.json", "no \"model_type\""]),
    (
        "unknown architecture",
        |f| config(f, "model_type", json!("mamba")),
        &["unknown architecture \"mamba\"", "llama", "mistral", "ministral3", "qwen2", "qwen3"],
    ),
    (
        "an encoder of a kind that is not read",
        |f| config(f, "model_type", json!("mpnet")),
        &["\"mpnet\" is an encoder of a kind", "bert", "Qwen3-Embedding"],
    ),
    (
        "missing field",
        |f| config(f, "hidden_size", Value::Null),
        &["config.json: missing field `hidden_size`"],
    ),
    (
        "field of another type",
        |f| config(f, "hidden_size", json!("128")),
        &["config.json: invalid type: string \"128\""],
    ),
    ("negative size", |f| config(f, "vocab_size", json!(-1)), &["config.json: invalid value: integer `-1`"]),
    ("zero size", |f| config(f, "num_attention_heads", json!(0)), &["num_attention_heads is 0"]),
    (
        "no layers end",
        |f| config(f, "num_hidden_layers", json!(2_000_000_000)),
        &["num_hidden_layers is 2000000000"],
    ),
    ("heads without end", |f| config(f, "head_dim", json!(1u64 << 40)), &["head_dim is 1099511627776"]),
    (
        "rotation beyond the head",
        |f| config(f, "partial_rotary_factor", json!(1e12)),
        &["partial_rotary_factor is 1000000000000"],
    ),
    (
        "heads and KV heads do not fit",
        |f| config(f, "num_key_value_heads", json!(3)),
        &["num_attention_heads is 8, no multiple of num_key_value_heads, 3"],
    ),
    (
        "unsupported activation",
        |f| config(f, "hidden_act", json!("gelu")),
        &["hidden_act is gelu", "not supported", "silu"],
    ),
    (
        "unsupported rotation",
        |f| config(f, "rope_scaling", json!({ "rope_type": "dynamic", "factor": 4.0 })),
        &["rope_type is \"dynamic\"", "default, linear, llama3, yarn, longrope"],
    ),
    (
        "divisors of the rotation missing",
        |f| config(f, "rope_scaling", json!({ "rope_type": "longrope" })),
        &["rope_scaling.short_factor is a list of 0 numbers", "positive numbers"],
    ),
    (
        "residual multiplier of zero",
        |f| config(f, "residual_multiplier", json!(0.0)),
        &["residual_multiplier is 0", "above 0"],
    ),
    (
        "value heads that key heads do not divide",
        |f| {
            config(f, "model_type", json!("qwen3_5"));
            for field in ["linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"] {
                config(f, field, json!(4));
            }
            config(f, "linear_num_key_heads", json!(4));
            config(f, "linear_num_value_heads", json!(6));
        },
        &["linear_num_value_heads is 6, no multiple of linear_num_key_heads, 4"],
    ),
    (
        "stretched rotation without a factor",
        |f| config(f, "rope_scaling", json!({ "type": "linear" })),
        &["rope_scaling.factor", "\"linear\" scaling needs"],
    ),
    (
        "rotation stretched backwards",
        |f| config(f, "rope_scaling", json!({ "type": "linear", "factor": -2.0 })),
        &["rope_scaling.factor is -2", "above 0"],
    ),
    (
        "ramp of no width",
        |f| {
            let ramp = json!({ "low_freq_factor": 4.0, "high_freq_factor": 4.0 });
            let mut scaling = json!({ "rope_type": "llama3", "factor": 8.0 });
            scaling.as_object_mut().expect("an object").extend(ramp.as_object().expect("an object").clone());
            config(f, "rope_scaling", scaling);
        },
        &["rope_scaling.low_freq_factor is 4", "high_freq_factor, 4"],
    ),
    (
        "turns below zero",
        |f| config(f, "rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0, "beta_fast": -32.0 })),
        &["rope_scaling.beta_fast is -32"],
    ),
    (
        "no original context",
        |f| {
            let scaling =
                json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0 });
            config(f, "rope_scaling", scaling);
        },
        &["rope_scaling.original_max_position_embeddings is 0"],
    ),
    (
        "scores scaled to nothing",
        |f| config(f, "rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0, "attention_factor": 0.0 })),
        &["rope_scaling.attention_factor is 0"],
    ),
    ("rotation of base one", |f| config(f, "rope_theta", json!(1.0)), &["rope_theta is 1"]),
    ("rotation of base below zero", |f| config(f, "rope_theta", json!(-1e4)), &["rope_theta is -10000"]),
    ("negative epsilon", |f| config(f, "rms_norm_eps", json!(-5.0)), &["rms_norm_eps is -5", "above 0"]),
    ("no epsilon", |f| config(f, "rms_norm_eps", json!(0.0)), &["rms_norm_eps is 0"]),
    ("epsilon without end", |f| config(f, "rms_norm_eps", json!(1e300)), &["rms_norm_eps is inf"]),
    (
        "negative temperature",
        |f| write(f, "generation_config.json", r#"{"do_sample": true, "temperature": -1}"#),
        &["generation_config.json: temperature is -1", "at most 2"],
    ),
    (
        "penalty of zero",
        |f| write(f, "generation_config.json", r#"{"repetition_penalty": 0}"#),
        &["generation_config.json: repetition_penalty is 0"],
    ),
    (
        "norm of NaN",
        |f| {
            let bytes = fs::read(f.join(WEIGHTS)).expect("weights");
            let (len, rest) = bytes.split_first_chunk::<8>().expect("a length");
            let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
            let tensors: Value = serde_json::from_slice(header).expect("a header");
            let at = tensors["model.norm.weight"]["data_offsets"][0].as_u64().expect("an offset") as usize;
            let mut data = data.to_vec();
            data[at + 4..at + 6].copy_from_slice(&[0xff, 0x7f]);
            write(f, WEIGHTS, safetensors(header, &data));
        },
        &["\"model.norm.weight\" has NaN at place 2", "download it again"],
    ),
    (
        "no weights",
        |f| {
            remove(f, WEIGHTS);
            remove(f, INDEX);
        },
        &["model.safetensors: no such file", "needs weights"],
    ),
    (
        "truncated weights",
        |f| {
            let bytes = fs::read(f.join(WEIGHTS)).expect("weights");
            write(f, WEIGHTS, &bytes[..bytes.len() - 1]);
        },
        &["model.safetensors: truncated", "download it again"],
    ),
    (
        "weights truncated in the header",
        |f| {
            let bytes = fs::read(f.join(WEIGHTS)).expect("weights");
            write(f, WEIGHTS, &bytes[..100]);
        },
        &["model.safetensors: not a safetensors file"],
    ),
    ("empty weights", |f| write(f, WEIGHTS, ""), &["model.safetensors: not a safetensors file"]),
    (
        "a web page in place of weights",
        |f| write(f, WEIGHTS, "<!DOCTYPE html><html>Sign in</html>"),
        &["model.safetensors: not a safetensors file"],
    ),
    (
        "header is not JSON",
        |f| write(f, WEIGHTS, safetensors(b"{{{{{{{{", &[])),
        &["model.safetensors: not a safetensors file"],
    ),
    (
        "tensors overlap",
        |f| edit_tensor(f, "model.norm.weight", "data_offsets", json!([0, 256])),
        &["model.safetensors: not a safetensors file"],
    ),
    (
        "tensor is not there",
        |f| {
            edit_header(f, |header| {
                let entry = header.remove("model.layers.1.mlp.up_proj.weight").expect("it was there");
                header.insert("model.layers.1.mlp.other.weight".into(), entry);
            })
        },
        &["\"model.layers.1.mlp.up_proj.weight\" is not in the model's files", "incomplete"],
    ),
    (
        "scales without biases",
        |f| {
            edit_header(f, |header| {
                let entry = header.remove("model.layers.0.mlp.up_proj.biases").expect("it was there");
                header.insert("other".into(), entry);
            })
        },
        &["\"model.layers.0.mlp.up_proj.biases\" is not in the model's files"],
    ),
    (
        "norm of another shape",
        |f| edit_tensor(f, "model.norm.weight", "shape", json!([64, 2])),
        &["\"model.norm.weight\" is BF16 [64, 2]", "config asks for [128]"],
    ),
    (
        "matrix of another shape",
        |f| config(f, "intermediate_size", json!(256)),
        &["mlp.gate_proj.weight\" is U32 [384, 16]", "config asks for U32 [256, 16]"],
    ),
    (
        "norm of another type",
        |f| edit_tensor(f, "model.norm.weight", "dtype", json!("I16")),
        &["\"model.norm.weight\" is I16", "F32, F16 or BF16"],
    ),
    (
        "packed weights of another type",
        |f| edit_tensor(f, "model.layers.0.mlp.up_proj.weight", "dtype", json!("I32")),
        &["\"model.layers.0.mlp.up_proj.weight\" is I32 [384, 16]", "U32 [384, 16]"],
    ),
    (
        "quantized, but nothing says how",
        |f| {
            config(f, "quantization", Value::Null);
            config(f, "quantization_config", Value::Null);
        },
        &["quantized (it has scales)", "config.json has no \"quantization\""],
    ),
    (
        "quantization of another width",
        |f| config(f, "quantization", json!({ "bits": 8, "group_size": 64 })),
        &["embed_tokens.weight\" is U32 [512, 16]", "U32 [512, 32]"],
    ),
    (
        "unsupported bits",
        |f| config(f, "quantization", json!({ "bits": 7, "group_size": 64 })),
        &["7 bits in groups of 64", "2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128"],
    ),
    (
        "unsupported group",
        |f| config(f, "quantization", json!({ "bits": 4, "group_size": 48 })),
        &["4 bits in groups of 48"],
    ),
    (
        "unsupported mode",
        |f| config(f, "quantization", json!({ "bits": 4, "group_size": 32, "mode": "nf4" })),
        &["quantization.mode is \"nf4\"", "affine, mxfp4, mxfp8 and nvfp4"],
    ),
    (
        "unsupported bits of one module",
        |f| {
            let module = json!({ "bits": 1, "group_size": 64 });
            config(
                f,
                "quantization",
                json!({ "bits": 4, "group_size": 64, "model.layers.0.mlp.up_proj": module }),
            );
        },
        &["1 bits in groups of 64"],
    ),
    (
        "another quantizer",
        |f| {
            config(f, "quantization", Value::Null);
            config(f, "quantization_config", json!({ "quant_method": "bitsandbytes" }));
        },
        &["quant_method is \"bitsandbytes\"", "mxfp4, fp8, gptq, awq and compressed-tensors"],
    ),
    (
        "GPTQ's settings for MLX's tensors",
        |f| {
            config(f, "quantization", Value::Null);
            config(f, "quantization_config", json!({ "quant_method": "gptq", "bits": 4, "group_size": 128 }));
        },
        &["quantized (it has scales)", "config.json has no \"quantization\""],
    ),
    (
        "index leads out of the folder",
        |f| {
            write(
                f,
                INDEX,
                json!({ "weight_map": { "model.norm.weight": "../model.safetensors" } }).to_string(),
            );
        },
        &["index.json", "\"../model.safetensors\"", "only files in the same folder"],
    ),
    (
        "index names the folder above",
        |f| {
            write(f, INDEX, json!({ "weight_map": { "model.norm.weight": ".." } }).to_string());
        },
        &["index.json", "\"..\"", "only files in the same folder"],
    ),
    (
        "index names a file that is not there",
        |f| {
            write(
                f,
                INDEX,
                json!({ "weight_map": { "model.norm.weight": "model-00002-of-00002.safetensors" } })
                    .to_string(),
            );
        },
        &["model-00002-of-00002.safetensors: no such file", "needs weights"],
    ),
    ("no tokenizer", |f| remove(f, "tokenizer.json"), &["tokenizer.json: not found", "save_pretrained"]),
    (
        "generation_config.json is not JSON",
        |f| write(f, "generation_config.json", "do_sample"),
        &["generation_config.json: expected value"],
    ),
];

#[test]
fn each_kind_of_bad_folder_has_its_clear_error() {
    let mut wrong = Vec::new();
    for (what, damage, parts) in CASES {
        let folder = copy();
        damage(folder.path());
        match read(folder.path()) {
            Ok(()) => wrong.push(format!("{what}: it was accepted")),
            Err(error) => {
                let text = error.to_string();
                let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
                if !missing.is_empty() {
                    wrong.push(format!("{what}: {text:?} lacks {missing:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Any JSON, with numbers that strain sizes.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        prop_oneof![0..600i64, any::<i64>(), (0..63u32).prop_map(|bits| 1 << bits), Just(0), Just(-1),]
            .prop_map(Value::from),
        prop_oneof![any::<f64>(), Just(0.0), Just(-1.0), Just(1e300), Just(1e-300)].prop_map(Value::from),
        prop_oneof![
            Just("yarn"),
            Just("llama3"),
            Just("linear"),
            Just("affine"),
            Just("silu"),
            Just("sliding_attention"),
            Just("F32"),
            Just(""),
        ]
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 12, 6, |inner| {
        let keys = prop_oneof![
            Just("rope_type"),
            Just("factor"),
            Just("bits"),
            Just("group_size"),
            Just("original_max_position_embeddings"),
            Just("beta_fast"),
            Just("rope_theta"),
            Just("shape"),
            Just("dtype"),
            Just("data_offsets"),
            Just("quant_method"),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..6).prop_map(|fields| fields
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect::<Value>()),
        ]
    })
}

/// config.json fields that are read.
const FIELDS: [&str; 24] = [
    "model_type",
    "text_config",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "quantization",
    "eos_token_id",
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// Any result is fine, without a panic, an endless loop or exhausted memory.
    #[test]
    fn random_bytes_never_panic(
        name in prop::sample::select(vec!["config.json", INDEX, WEIGHTS, "generation_config.json"]),
        bytes in prop::collection::vec(any::<u8>(), 0..200), header in any::<bool>(),
    ) {
        let folder = copy();
        // Behind a valid length, the header is read too.
        let bytes = if header && name == WEIGHTS { safetensors(&bytes, &[0; 64]) } else { bytes };
        write(folder.path(), name, bytes);
        prop_assert!(read(folder.path()).is_err());
    }

    #[test]
    fn random_configs_never_panic(fields in prop::collection::vec((prop::sample::select(FIELDS.to_vec()), any_json()), 1..4)) {
        let folder = copy();
        for (field, value) in fields {
            config(folder.path(), field, value);
        }
        // Some folders open: not every field matters to this model.
        drop(read(folder.path()));
    }

    #[test]
    fn random_headers_never_panic(
        field in prop::sample::select(vec!["dtype", "shape", "data_offsets"]), value in any_json(), which in any::<prop::sample::Index>(),
    ) {
        let folder = copy();
        edit_header(folder.path(), |header| {
            let names: Vec<_> = header.keys().cloned().collect();
            header[which.get(&names)][field] = value;
        });
        drop(read(folder.path()));
    }

    #[test]
    fn random_indexes_never_panic(map in any_json(), file in any_json()) {
        let folder = copy();
        write(folder.path(), INDEX, json!({ "weight_map": { "a": file } }).to_string());
        drop(read(folder.path()));
        write(folder.path(), INDEX, json!({ "weight_map": map }).to_string());
        drop(read(folder.path()));
    }
}

/// Tensors that no rank reads, by the sentence on them.
fn unread(folder: &Path) -> Option<String> {
    let folder = ModelFolder::open(folder).expect("it opens");
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0]).expect("a plan");
    shard_footprints(&folder, &plan, KvFormat::F16).expect("described");
    thunder_model::unread_tensors(&folder)
}

#[test]
fn tensors_that_the_config_does_not_ask_for_are_named() {
    assert_eq!(unread(good()), None, "a good folder has none");
    let folder = copy();
    config(folder.path(), "num_hidden_layers", json!(1));
    let text = unread(folder.path()).expect("a layer too many");
    assert!(text.contains("layer 1 (config.json has 1 layers)"), "{text}");
}
