//! Tables indexed by the last tokens (DeepSeek V4.1): tokenizers of other models, and pipelines,
//! are refused. `golden.rs` has the logits.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::Value;
use thunder_collectives::Group;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat};
use thunder_model::model::shard_footprints;
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan};

fn case() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases/deepseek_v41-engram")
}

/// The result of loading a copy of the case, changed by `change`.
fn loaded(change: impl FnOnce(&Path)) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(case().join(file), folder.path().join(file)).unwrap();
    }
    change(folder.path());
    let folder = ModelFolder::open(folder.path()).map_err(|error| error.to_string())?;
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let config = CpuConfig::new(1, Isa::detect().unwrap(), Activations::Int16);
    let mut backend = CpuBackend::new(&config, Group::solo());
    let capacity = Capacity { rows: 4, logit_rows: 4, kv_blocks: 1, slots: 1, kv_format: KvFormat::F16 };
    let go_on = &mut |_, _| ControlFlow::Continue(());
    Model::load(&folder, &plan, 0, capacity, &mut backend, go_on).map(drop).map_err(|error| error.to_string())
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(path, json.to_string()).unwrap();
}

#[test]
fn a_tokenizer_with_other_tokens_is_refused() {
    assert_eq!(loaded(|_| {}), Ok(()));
    let text = loaded(|folder| std::fs::remove_file(folder.join("tokenizer.json")).unwrap()).unwrap_err();
    assert!(text.contains("tokenizer.json") && text.contains("not found"), "{text}");
    // "the" becomes what no other token is.
    let text = loaded(|folder| {
        edit(&folder.join("tokenizer.json"), |json| {
            let vocab = json["model"]["vocab"].as_object_mut().unwrap();
            let id = vocab.remove("THE").unwrap();
            vocab.insert("another".into(), id);
        });
    });
    let text = text.unwrap_err();
    assert!(text.contains("256 different numbers") && text.contains("is 255"), "{text}");
}

#[test]
fn a_padding_that_no_token_has_is_refused() {
    // The vocabulary has 300 tokens.
    for (pad, expected) in
        [(300, "engram_pad_token_id is 300"), (u32::MAX, "engram_pad_token_id is 4294967295")]
    {
        let text = loaded(|folder| {
            edit(&folder.join("config.json"), |json| json["engram_pad_token_id"] = pad.into());
        });
        assert!(text.as_ref().is_err_and(|text| text.contains(expected)), "{text:?}");
    }
    // A tokenizer without the vocabulary's last tokens.
    let text = loaded(|folder| {
        edit(&folder.join("config.json"), |json| {
            json["engram_pad_token_id"] = 299.into();
            json["engram_compressed_vocab_size"] = 254.into();
        });
        edit(&folder.join("tokenizer.json"), |json| {
            let added = json["added_tokens"].as_array_mut().unwrap();
            added.retain(|token| token["id"] != 299);
            json["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| *id != 299);
        });
    });
    let text = text.unwrap_err();
    assert!(text.contains("299 tokens") && text.contains("config.json, 299"), "{text}");
}

#[test]
fn tables_are_divided_by_rows_and_are_not_read_whole() {
    let folder = ModelFolder::open(&case()).unwrap();
    let footprints = |ranks| {
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
        shard_footprints(&folder, &plan, KvFormat::F16).unwrap()
    };
    // 408 and 480 rows of 32 numbers in bf16.
    let tables = (408 + 480) * 32 * 2;
    for ranks in [1, 2, 3, 5] {
        let all = footprints(ranks);
        assert_eq!(all.iter().map(|rank| rank.table_bytes).sum::<u64>(), tables);
        assert!(all.iter().all(|rank| rank.table_bytes < tables / ranks as u64 + 2 * 16 * 32 * 2));
        assert!(all.iter().all(|rank| rank.read_bytes(1) <= rank.weight_bytes - rank.table_bytes));
    }
}

#[test]
fn a_stage_does_not_read_what_another_one_keeps() {
    let folder = ModelFolder::open(&case()).unwrap();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Pipeline, &[1.0; 2]).unwrap();
    let text = shard_footprints(&folder, &plan, KvFormat::F16).unwrap_err().to_string();
    assert!(text.contains("would be on another rank") && text.contains("--parallel tensor"), "{text}");
}
