//! GGUF files: values of every type against the `gguf` package, logits of whole models against
//! llama.cpp, tokenizers against the tokenizer.json of the same model.
//!
//! The fixtures and how they were made: tests/golden/gguf/README.md.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use thunder_collectives::Group;
use thunder_compute::{Activations, Block, Encoding, KvFormat, MatrixSource, Overlap, RowOrder, Strided};
use thunder_model::model::shard_footprints;
use thunder_model::{ModelFolder, Parallelism, ShardPlan};

use crate::common::{check, compare, golden, limits, logits, sharded_logits};

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf/cases")
}

/// The first file of each model, and the file with its logits.
fn models() -> Vec<(PathBuf, PathBuf)> {
    let names = [
        "llama-bf16-biases",
        "llama-f16",
        "llama-iq4",
        "llama-q4_k_m",
        "mistral3-q8_0",
        "qwen2-q5-q4_1",
        "qwen3-q4_0",
        "qwen3-q2_k-q3_k-00001-of-00002",
        "seed_oss-f16",
        "ernie4_5-bf16",
        "smollm3-f16",
        "mixtral-q5_0",
        "qwen2moe-q8_0",
        "qwen3moe-q4_0",
        "glm4moe-q8_0",
        "gpt-oss-mxfp4",
        "deepseek2-v3",
        "deepseek2-whole_kv_b",
    ];
    let logits = |name: &str| name.trim_end_matches("-00001-of-00002").to_owned() + ".safetensors";
    names.map(|name| (cases().join(format!("{name}.gguf")), cases().join(logits(name)))).into()
}

/// Files that llama.cpp's converter made of models of transformers, whose logits these are.
const CONVERTED: [&str; 56] = [
    "deepseek32",
    "glm-dsa",
    "phi3",
    "olmo2",
    "olmo2-olmo3",
    "deepseek2-v2_lite",
    "deepseek2-glm_4_7_flash",
    "granite",
    "glm4",
    "gemma2",
    "command-r",
    "cohere2",
    "hunyuan-dense",
    "hunyuan-moe",
    "llama4",
    "minimax-m2",
    "nemotron_h_moe",
    "nemotron_h",
    "gemma3",
    "gemma4",
    "exaone4",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "kimi-linear",
    "gemma4-experts",
    "kimi-k3",
    "arcee",
    "gemma",
    "olmoe",
    "granitemoe",
    "granitehybrid",
    "granitehybrid-dense",
    "ernie4_5-moe",
    "mellum",
    "dots1",
    "exaone-moe",
    "hy_v3",
    "glm4moe-solar",
    "mimo2",
    "mistral4",
    "glm5-next",
    "deepseek4",
    "lfm2",
    "lfm2moe",
    "granite_swa",
    "granite_swa-experts",
    "minicpm",
    "minicpm3",
    "bailingmoe2",
    "gemma4-unified",
    "deepseek2-youtu",
    "llama-internlm3",
    "qwen2vl",
    "qwen3vl",
    "qwen3vlmoe",
];

#[test]
fn converted_files_give_the_logits_of_transformers_on_any_ranks() {
    for name in CONVERTED {
        let model = cases().join(format!("{name}.gguf"));
        let exact = golden(&cases().join(format!("{name}.safetensors")), "logits");
        let folder = ModelFolder::open(&model).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        for activations in [Activations::F32, Activations::Auto] {
            let ours = logits(&exact, &folder, &plan, Group::solo(), (activations, Overlap::Auto), 70);
            let rounds = activations == Activations::Auto && routes(&folder);
            check(&model, "one rank", compare(&exact, &ours, rounds), limits(activations));
        }
        for ranks in [2, 3, 5] {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
            let arithmetic = (Activations::Int16, Overlap::Auto);
            let ours = sharded_logits(&exact, &folder, &plan, arithmetic, 45);
            let result = compare(&exact, &ours, false);
            check(&model, &format!("{ranks} ranks"), result, limits(Activations::Int16));
        }
    }
}

#[test]
fn values_of_every_type_equal_those_of_the_gguf_package() {
    let bytes = std::fs::read(cases().join("blocks.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for block in Block::ALL {
        let stored = file.tensor(&format!("blocks.{}", block.name())).unwrap();
        let values = file.tensor(&format!("values.{}", block.name())).unwrap();
        let [rows, row_bytes] = stored.shape() else { panic!("rows of blocks") };
        assert_eq!(*row_bytes, block.bytes(), "{}", block.name());
        let source = MatrixSource {
            rows: *rows,
            cols: block.columns(),
            encoding: Encoding::Blocks(block),
            weight: Strided { bytes: stored.data(), stride: *row_bytes, row_bytes: *row_bytes },
            scales: None,
            offsets: None,
            row_order: RowOrder::AsStored,
            first_row: 0,
            bias: None,
            pages: None,
        };
        let mut row = vec![0.0; block.columns()];
        let expected = values.data().as_chunks::<4>().0;
        assert_eq!(expected.len(), rows * block.columns());
        for (index, expected) in expected.chunks(block.columns()).enumerate() {
            source.dequantize_row(index, &mut row);
            let expected: Vec<f32> = expected.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            for (column, (ours, expected)) in row.iter().zip(&expected).enumerate() {
                // `scale * level + offset` rounds once more than `scale * (level - middle)`.
                let near = (ours - expected).abs() <= largest * 2f32.powi(-22);
                // Beyond f32's range one of both may be NaN.
                let beyond = !ours.is_finite() && !expected.is_finite();
                assert!(
                    near || beyond || ours == expected,
                    "{}: row {index}, column {column} is {ours}, not {expected}",
                    block.name()
                );
            }
        }
    }
}

/// True if rounded activations may change which experts a token takes.
fn routes(folder: &ModelFolder) -> bool {
    folder.spec.layers.iter().any(|layer| layer.feed_forward.experts().is_some())
}

#[test]
fn logits_equal_those_of_llama_cpp() {
    for (model, expected) in models() {
        let folder = ModelFolder::open(&model).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let exact = golden(&expected, "logits");
        for (activations, what) in [
            (Activations::F32, "f32"),
            (Activations::Int16, "int16"),
            (Activations::Auto, "auto"),
            (Activations::Bf16, "bf16"),
        ] {
            let ours = logits(&exact, &folder, &plan, Group::solo(), (activations, Overlap::Auto), 70);
            let rounds = !matches!(activations, Activations::F32 | Activations::Int16);
            check(&model, what, compare(&exact, &ours, rounds && routes(&folder)), limits(activations));
        }
        // llama.cpp on the same file rounds activations to bytes: its own error is up to 1.7 %.
        let same_file = golden(&expected, "same_file");
        let ours = logits(&exact, &folder, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), 70);
        check(&model, "same file", compare(&same_file, &ours, routes(&folder)), (2e-2, 0.95));
    }
}

#[test]
fn any_number_of_ranks_gives_the_same_logits() {
    for (index, (model, expected)) in models().into_iter().enumerate() {
        let folder = ModelFolder::open(&model).unwrap();
        let golden = golden(&expected, "logits");
        let uneven: &[f64] = if index % 2 == 0 { &[3.0, 1.0] } else { &[1.0, 0.2, 2.0] };
        let splits: [&[f64]; 4] = [&[1.0; 2], &[1.0; 3], &[1.0; 5], uneven];
        for weights in splits {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            let arithmetic = (Activations::Int16, Overlap::Auto);
            let ours = sharded_logits(&golden, &folder, &plan, arithmetic, 45);
            check(&model, &format!("{weights:?}"), compare(&golden, &ours, false), limits(arithmetic.0));
        }
        let stages = ShardPlan::new(&folder.spec, Parallelism::Pipeline, &[1.0, 1.0]).unwrap();
        let footprints = shard_footprints(&folder, &stages, KvFormat::F16).unwrap();
        let half = folder.spec.layers.len() / 2;
        assert!(footprints.iter().all(|rank| rank.layers.len() == half), "{}", model.display());
    }
}

/// Blocks of 256 columns are not divided, so models with rows of one block are left out here.
#[test]
fn ranks_read_their_own_parts() {
    for name in [
        "llama-f16",
        "mistral3-q8_0",
        "qwen2-q5-q4_1",
        "qwen3-q4_0",
        "qwen3moe-q4_0",
        "gpt-oss-mxfp4",
        "deepseek2-v3",
    ] {
        let folder = ModelFolder::open(&cases().join(format!("{name}.gguf"))).unwrap();
        let bytes = |weights: &[f64]| -> Vec<u64> {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            let ranks = shard_footprints(&folder, &plan, KvFormat::F16).unwrap();
            ranks.iter().map(|rank| rank.file_bytes).collect()
        };
        let whole = bytes(&[1.0])[0];
        assert!(whole <= folder.weights.bytes() && whole * 10 > folder.weights.bytes() * 9, "{name}");
        let halves = bytes(&[1.0, 1.0]);
        assert!(halves.iter().all(|half| *half < whole * 3 / 4), "{name}: {halves:?} of {whole}");
    }
}

/// docs/kernels.md, "GGUF's types": bits a weight in files and in memory.
#[test]
fn plans_count_what_weights_take_in_memory() {
    // Fixtures mix types, so that their share is stated only where it is one type's.
    for (name, least, most) in
        [("llama-f16", 1.0, 1.0), ("qwen3-q4_0", 1.0, 1.0), ("gpt-oss-mxfp4", 1.01, 1.06)]
    {
        let folder = ModelFolder::open(&cases().join(format!("{name}.gguf"))).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let rank = &shard_footprints(&folder, &plan, KvFormat::F16).unwrap()[0];
        let share = rank.weight_bytes as f64 / rank.file_bytes as f64;
        assert!((least..=most).contains(&share), "{name}: {share}");
    }
}

/// The folders of fixtures/text whose tokenizers the models have.
const TEXTS: [(&str, &str); 3] =
    [("llama-f16", "llama3"), ("qwen3-q4_0", "qwen"), ("mistral3-q8_0", "mistral")];

#[test]
fn tokenizers_give_the_ids_of_the_same_tokenizer_json() {
    for (model, style) in TEXTS {
        let folder = ModelFolder::open(&cases().join(format!("{model}.gguf"))).unwrap();
        let tokenizer = folder.tokenizer().unwrap();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text").join(style);
        let cases: Vec<Value> =
            serde_json::from_slice(&std::fs::read(fixture.join("expected.json")).unwrap()).unwrap();
        let ids = |case: &Value, key: &str| -> Vec<u64> {
            case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
        };
        assert!(cases.len() > 20, "{style} has its cases");
        for case in &cases {
            let text = case["text"].as_str().unwrap();
            let encode = |special| -> Vec<u64> {
                tokenizer.encode(text, special).unwrap().into_iter().map(u64::from).collect()
            };
            assert_eq!(encode(false), ids(case, "ids"), "{style}: {text:?}");
            assert_eq!(encode(true), ids(case, "ids_special"), "{style}: {text:?}");
            let tokens: Vec<u32> = ids(case, "ids").into_iter().map(|id| id as u32).collect();
            assert_eq!(tokenizer.decode(&tokens, true), case["decoded"], "{style}: {text:?}");
            assert_eq!(tokenizer.decode(&tokens, false), case["decoded_special"], "{style}: {text:?}");
        }
    }
}

#[test]
fn a_chat_template_and_the_end_of_texts_come_from_the_file() {
    let ends = [
        ("llama-f16", vec!["<|end_of_text|>", "<|eot_id|>"]),
        ("qwen3-q4_0", vec!["<|endoftext|>", "<|im_end|>"]),
    ];
    for (model, ends) in ends {
        let folder = ModelFolder::open(&cases().join(format!("{model}.gguf"))).unwrap();
        let tokenizer = folder.tokenizer().unwrap();
        let ids: Vec<u32> = ends.iter().map(|token| tokenizer.token_id(token).unwrap()).collect();
        assert_eq!(folder.spec.eos, ids, "{model}");
    }
    let folder = ModelFolder::open(&cases().join("llama-f16.gguf")).unwrap();
    let template = folder.chat_template().unwrap().unwrap();
    let prompt = template.render(&[json!({ "role": "user", "content": "hi" })], &Map::new()).unwrap();
    assert_eq!(prompt, "<|begin_of_text|>[user] hi");
}

#[test]
fn any_part_of_a_split_model_opens_all_of_it() {
    let first = cases().join("qwen3-q2_k-q3_k-00001-of-00002.gguf");
    let second = cases().join("qwen3-q2_k-q3_k-00002-of-00002.gguf");
    let [by_first, by_second] = [&first, &second].map(|path| ModelFolder::open(path).unwrap());
    assert_eq!(by_first.spec, by_second.spec);
    assert_eq!(by_first.weights.fingerprint(), by_second.weights.fingerprint());
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(&first, dir.path().join("a-00001-of-00002.gguf")).unwrap();
    let error = ModelFolder::open(&dir.path().join("a-00001-of-00002.gguf")).unwrap_err().to_string();
    assert!(error.contains("a-00002-of-00002.gguf: no such file"), "{error}");
    std::fs::copy(&first, dir.path().join("a-00002-of-00002.gguf")).unwrap();
    let error = ModelFolder::open(&dir.path().join("a-00001-of-00002.gguf")).unwrap_err().to_string();
    assert!(error.contains("it is part 1, not part 2 as its name says"), "{error}");
    std::fs::copy(&first, dir.path().join("alone.gguf")).unwrap();
    let error = ModelFolder::open(&dir.path().join("alone.gguf")).unwrap_err().to_string();
    assert!(error.contains("one of 2 files"), "{error}");
}
