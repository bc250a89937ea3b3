//! Quantized formats of Hugging Face folders: logits against MLX-LM's for the exact values, and
//! damaged folders.
//!
//! The fixtures and how they were made: tests/golden/formats/README.md.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use thunder_collectives::Group;
use thunder_compute::{Activations, KvFormat, Overlap};
use thunder_model::model::shard_footprints;
use thunder_model::{ModelError, ModelFolder, Parallelism, ShardPlan};

use crate::common::{check, compare, golden, limits, logits, sharded_logits};

const NAMES: [&str; 15] = [
    "deepseek_v3-fp8",
    "deepseek_v4-fp8",
    "deepseek_v41-fp8",
    "gpt_oss-mxfp4_blocks",
    "kimi_k2-int4-g32",
    "llama-fp8-tensor",
    "llama-gptq-8bit-row",
    "llama-gptq_v2-g64",
    "llama-int4-g32-zeros",
    "llama-int8-channel",
    "llama-mxfp8",
    "qwen2-gptq-g32",
    "qwen3-awq-g32",
    "qwen3-fp8-channel",
    "qwen3-nvfp4",
];

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/formats/cases").join(name)
}

/// E4M3 numbers become 8-bit levels, which move small weights (compute's source/e4m3.rs).
fn allowed(name: &str, activations: Activations) -> (f64, f64) {
    let (error, same) = limits(activations);
    if name.contains("fp8") { (error.max(1e-2), same.min(0.98)) } else { (error, same) }
}

/// True if rounded weights may change which experts a token uses, and which tokens it attends to.
fn may_reroute(name: &str) -> bool {
    ["deepseek_v4-fp8", "deepseek_v41-fp8"].contains(&name)
}

#[test]
fn one_rank_agrees_with_mlx_on_the_exact_values() {
    for name in NAMES {
        let folder = ModelFolder::open(&case(name)).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let golden = golden(&case(name).join("golden.safetensors"), "logits");
        for (activations, what) in [
            (Activations::F32, "f32"),
            (Activations::Int16, "int16"),
            (Activations::Auto, "auto"),
            (Activations::Bf16, "bf16"),
        ] {
            let ours = logits(&golden, &folder, &plan, Group::solo(), (activations, Overlap::Auto), 70);
            // Rounded activations may change gpt-oss's choice of experts.
            let rounds = !matches!(activations, Activations::F32 | Activations::Int16);
            let median = may_reroute(name) || (name.starts_with("gpt_oss") && rounds);
            check(&case(name), what, compare(&golden, &ours, median), allowed(name, activations));
        }
    }
}

#[test]
fn any_number_of_ranks_gives_the_same_logits() {
    for (index, name) in NAMES.into_iter().enumerate() {
        let folder = ModelFolder::open(&case(name)).unwrap();
        let golden = golden(&case(name).join("golden.safetensors"), "logits");
        let uneven: &[f64] = if index % 2 == 0 { &[3.0, 1.0] } else { &[1.0, 0.2, 2.0] };
        let splits: [&[f64]; 4] = [&[1.0; 2], &[1.0; 3], &[1.0; 5], uneven];
        for weights in splits {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            let arithmetic = (Activations::Int16, Overlap::Auto);
            let ours = sharded_logits(&golden, &folder, &plan, arithmetic, 45);
            check(
                &case(name),
                &format!("{weights:?}"),
                compare(&golden, &ours, may_reroute(name)),
                allowed(name, arithmetic.0),
            );
        }
    }
}

/// No tensor is left over, and two ranks read about what one reads.
#[test]
fn all_tensors_are_read_and_ranks_read_their_parts() {
    for name in NAMES {
        let folder = ModelFolder::open(&case(name)).unwrap();
        let bytes = |ranks: &[f64]| -> Vec<u64> {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, ranks).unwrap();
            let footprints = shard_footprints(&folder, &plan, KvFormat::F16).unwrap();
            footprints.iter().map(|rank| rank.file_bytes).collect()
        };
        let whole = bytes(&[1.0])[0];
        assert_eq!(thunder_model::unread_tensors(&folder), None, "{name}");
        let all = folder.weights.bytes();
        // GPTQ has the group of each column, which only says that groups are consecutive.
        assert!(whole <= all && whole * 100 > all * 90, "{name}: {whole} of {all}");
        // 128 columns in groups of a whole row are one unit in memory. Large parts of a small
        // DeepSeek V4 are not divided, mainly the weights of its streams.
        if ["llama-gptq-8bit-row", "llama-int8-channel", "deepseek_v4-fp8", "deepseek_v41-fp8"]
            .contains(&name)
        {
            continue;
        }
        let halves = bytes(&[1.0, 1.0]);
        assert!(halves.iter().all(|half| *half < whole * 3 / 4), "{name}: {halves:?} of {whole}");
    }
}

/// Tensors by name: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(name: &str) -> Tensors {
    let bytes = std::fs::read(case(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all = file.tensors().into_iter();
    all.map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))).collect()
}

fn config(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(case(name).join("config.json")).unwrap()).unwrap()
}

fn folder(config: &Value, tensors: &Tensors) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        })
        .collect();
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// gpt-oss in MLX's form: gate and up in separate stacks, blocks as words.
#[test]
fn gpt_oss_gives_the_bits_of_the_same_weights_in_mlx_format() {
    let name = "gpt_oss-mxfp4_blocks";
    let mut mlx = Tensors::new();
    for (name, (dtype, shape, bytes)) in tensors(name) {
        let module = name.trim_end_matches("_blocks").trim_end_matches("_scales").trim_end_matches("_bias");
        if !name.contains(".experts.") {
            mlx.insert(name, (dtype, shape, bytes));
            continue;
        }
        let (end, dtype) = match name.rsplit('_').next().unwrap() {
            "blocks" => ("weight", Dtype::U32),
            "scales" => ("scales", Dtype::U8),
            _ => ("bias", dtype),
        };
        let row = bytes.len() / (shape[0] * shape[1]);
        let mut columns: Vec<usize> = shape[2..].to_vec();
        if end == "weight" {
            columns = vec![row / 4];
        }
        let Some(stem) = module.strip_suffix("gate_up_proj") else {
            mlx.insert(format!("{module}.{end}"), (dtype, [&shape[..2], &columns].concat(), bytes));
            continue;
        };
        for (turn, part) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let own = bytes.chunks(row).skip(turn).step_by(2).flatten().copied().collect();
            let shape = [&[shape[0], shape[1] / 2], columns.as_slice()].concat();
            mlx.insert(format!("{stem}{part}.{end}"), (dtype, shape, own));
        }
    }
    let mut settings = config(name);
    settings["quantization_config"] = Value::Null;
    settings["quantization"] = json!({ "group_size": 32, "bits": 4, "mode": "mxfp4" });
    let mlx = folder(&settings, &mlx);
    let golden = golden(&case(name).join("golden.safetensors"), "logits");
    let [ours, theirs] = [&case(name), mlx.path()].map(|path| {
        let folder = ModelFolder::open(path).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0]).unwrap();
        sharded_logits(&golden, &folder, &plan, (Activations::Auto, Overlap::Auto), 45)
    });
    assert_eq!(ours, theirs);
}

/// Opens a folder and describes what two ranks would read.
fn describe(folder: &Path) -> Result<(), ModelError> {
    let folder = ModelFolder::open(folder)?;
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0])?;
    shard_footprints(&folder, &plan, KvFormat::F16).map(drop)
}

/// For every tensor of every format that is missing or has another shape or type, the error names
/// the tensor.
#[test]
fn damaged_tensors_are_named() {
    for name in NAMES {
        let (config, whole) = (config(name), tensors(name));
        for tensor in whole.keys().filter(|tensor| !tensor.ends_with("weight_shape")) {
            let (dtype, shape, bytes) = whole[tensor].clone();
            let other = if dtype == Dtype::U16 { Dtype::I16 } else { Dtype::U16 };
            let halves = shape.iter().product::<usize>() * dtype.bitsize() / 16;
            let mut longer = shape.clone();
            longer.push(2);
            let damages = [
                None,
                Some((dtype, longer, [bytes.clone(), bytes.clone()].concat())),
                Some((other, vec![halves], bytes[..halves * 2].to_vec())),
            ];
            for (kind, damage) in damages.into_iter().enumerate() {
                let mut damaged = whole.clone();
                match damage {
                    Some(other) => drop(damaged.insert(tensor.clone(), other)),
                    None => drop(damaged.remove(tensor)),
                }
                // GPTQ's groups may be missing; if the head is missing, it is the embedding.
                if kind == 0 && (tensor.ends_with(".g_idx") || tensor == "lm_head.weight") {
                    continue;
                }
                let folder = folder(&config, &damaged);
                let error = describe(folder.path()).err().map(|error| error.to_string());
                let error = error.unwrap_or_else(|| panic!("{name}: {tensor}, damage {kind}, is accepted"));
                // A module without its elements is named by the first of its possible names.
                let mut parts = tensor.split('.').rev();
                let part = parts.find(|part| !["weight", "bias", "scales"].contains(part)).unwrap();
                let stem = match part {
                    "qweight" => "proj",
                    // A layer's norm that is missing is called by its usual name.
                    "attn_norm" | "ffn_norm" if kind == 0 => "layernorm",
                    part => part.split('_').next().unwrap(),
                };
                assert!(error.contains(stem), "{name}: {tensor}, damage {kind}: {error}");
            }
        }
    }
}

#[test]
fn scattered_groups_are_refused_with_the_remedy() {
    let name = "qwen2-gptq-g32";
    let mut tensors = tensors(name);
    let tensor = "model.layers.1.mlp.down_proj.g_idx";
    tensors.get_mut(tensor).unwrap().2.rotate_left(4);
    let folder = folder(&config(name), &tensors);
    let error = describe(folder.path()).unwrap_err().to_string();
    assert!(error.contains(tensor) && error.contains("without act-order"), "{error}");
}

#[test]
fn settings_that_are_not_supported_are_named() {
    for (name, field, value, expected) in [
        ("deepseek_v3-fp8", "weight_block_size", json!([128, 100]), "weight_block_size is [128, 100]"),
        ("deepseek_v3-fp8", "fmt", json!("e5m2"), "fmt is \"e5m2\""),
        ("deepseek_v3-fp8", "weight_block_size", json!([64, 64]), "weight_scale_inv"),
        ("qwen2-gptq-g32", "bits", json!(3), "bits is 3 (gptq)"),
        ("qwen2-gptq-g32", "group_size", json!(48), "group_size is 48"),
        ("qwen2-gptq-g32", "group_size", json!(i64::MAX), "group_size is"),
        ("qwen2-gptq-g32", "checkpoint_format", json!("marlin"), "checkpoint_format is \"marlin\""),
        ("qwen3-awq-g32", "version", json!("gemv"), "version is \"gemv\" (awq)"),
        ("qwen3-awq-g32", "bits", json!(8), "bits is 8 (awq)"),
        ("kimi_k2-int4-g32", "format", json!("marlin-24"), "format is \"marlin-24\""),
        ("kimi_k2-int4-g32", "config_groups", json!({}), "no config_groups"),
        ("gpt_oss-mxfp4_blocks", "quant_method", json!("fp8"), "in MXFP4 blocks"),
        ("llama-mxfp8", "group_size", json!(64), "mxfp8 with 8 bits in groups of 64"),
    ] {
        let mut config = config(name);
        let key = if config["quantization"].is_object() { "quantization" } else { "quantization_config" };
        config[key][field] = value;
        let folder = folder(&config, &tensors(name));
        let error = describe(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}, {field}: {error}");
    }
}

/// Numbers and texts that strain sizes.
fn any_setting() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<i64>().prop_map(Value::from),
        (0..63u32).prop_map(|bits| Value::from(1u64 << bits)),
        (-2..300i64).prop_map(Value::from),
        prop::collection::vec(any::<u32>(), 0..4).prop_map(Value::from),
        prop::collection::vec(0..300u32, 2..3).prop_map(Value::from),
        prop::sample::select(vec![
            "gptq",
            "awq",
            "fp8",
            "mxfp4",
            "compressed-tensors",
            "channel",
            "group",
            "block",
            ""
        ])
        .prop_map(Value::from),
    ]
}

const SETTINGS: [&str; 14] = [
    "quant_method",
    "bits",
    "group_size",
    "checkpoint_format",
    "version",
    "fmt",
    "weight_block_size",
    "format",
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "block_structure",
    "mode",
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// Any result is fine, without a panic or exhausted memory.
    #[test]
    fn random_settings_never_panic(
        name in prop::sample::select(NAMES.to_vec()),
        settings in prop::collection::vec((prop::sample::select(SETTINGS.to_vec()), any_setting()), 1..4),
    ) {
        let mut config = config(name);
        let key = if config["quantization"].is_object() { "quantization" } else { "quantization_config" };
        for (field, value) in settings {
            let weights = &mut config[key]["config_groups"]["group_0"]["weights"];
            if weights.is_object() && ["num_bits", "type", "symmetric", "strategy", "block_structure", "group_size"].contains(&field) {
                weights[field] = value.clone();
            } else {
                config[key][field] = value;
            }
        }
        let folder = folder(&config, &tensors(name));
        drop(describe(folder.path()));
    }

    /// Any bytes, cut anywhere.
    #[test]
    fn files_cut_anywhere_never_panic(name in prop::sample::select(NAMES.to_vec()), at in any::<prop::sample::Index>()) {
        let bytes = std::fs::read(case(name).join("model.safetensors")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config(name).to_string()).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), &bytes[..at.index(bytes.len())]).unwrap();
        prop_assert!(describe(folder.path()).is_err());
    }
}
