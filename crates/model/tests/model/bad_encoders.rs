//! Folders of encoders that are damaged or require something unsupported, and the errors that they
//! must give.

use std::error::Error;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use thunder_compute::KvFormat;
use thunder_model::model::shard_footprints;
use thunder_model::{ModelFolder, Parallelism, Pooling, ShardPlan};

fn copy(name: &str) -> TempDir {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/encoders").join(name);
    let folder = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("a file").path();
        fs::copy(&path, folder.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    folder
}

/// Reads everything that is read before weights are packed.
fn read(folder: &Path) -> Result<ModelFolder, Box<dyn Error>> {
    let folder = ModelFolder::open(folder)?;
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0])?;
    shard_footprints(&folder, &plan, KvFormat::F16)?;
    Ok(folder)
}

fn write(folder: &Path, name: &str, content: &Value) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    fs::write(path, content.to_string()).expect("written");
}

fn config(folder: &Path, field: &str, value: Value) {
    let bytes = fs::read(folder.join("config.json")).expect("it is there");
    let mut config: Value = serde_json::from_slice(&bytes).expect("JSON");
    config[field] = value;
    write(folder, "config.json", &config);
}

fn module(kind: &str, path: &str) -> Value {
    json!({ "idx": 0, "name": "0", "path": path, "type": format!("sentence_transformers.models.{kind}") })
}

#[test]
fn what_is_wrong_is_named() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &[&str]); 19] = [
        ("modernbert", |f| config(f, "norm_bias", json!(true)), &["norm_bias", "true"]),
        ("modernbert", |f| config(f, "layer_types", json!(["full_attention"])), &["layer_types[1]"]),
        ("bert", |f| config(f, "hidden_size", json!(50)), &["config.json", "hidden_size 50", "3 heads"]),
        ("bert", |f| config(f, "vocab_size", json!(0)), &["vocab_size is 0"]),
        (
            "bert",
            |f| config(f, "num_hidden_layers", json!(1u64 << 60)),
            &["num_hidden_layers is 11529", "4096"],
        ),
        (
            "modernbert",
            |f| config(f, "num_hidden_layers", json!(1u64 << 40)),
            &["num_hidden_layers is 10995", "4096"],
        ),
        ("bert", |f| config(f, "vocab_size", json!(170)), &["word_embeddings", "163", "170"]),
        ("bert", |f| config(f, "max_position_embeddings", json!(90)), &["position_embeddings", "80", "90"]),
        ("bert", |f| config(f, "hidden_act", json!("mish")), &["hidden_act", "mish", "gelu"]),
        ("bert", |f| config(f, "layer_norm_eps", json!(0)), &["layer_norm_eps is 0"]),
        (
            "bert",
            |f| config(f, "position_embedding_type", json!("relative_key")),
            &["relative_key", "absolute"],
        ),
        ("bert", |f| config(f, "is_decoder", json!(true)), &["is_decoder"]),
        (
            "bert",
            |f| config(f, "architectures", json!(["BertForTokenClassification"])),
            &["TokenClass", "rerank"],
        ),
        (
            "bert-rerank",
            |f| config(f, "id2label", json!({"0": "a", "1": "b", "2": "c"})),
            &["id2label", "3 labels", "rerankers"],
        ),
        ("xlm-roberta", |f| config(f, "pad_token_id", json!(81)), &["max_position_embeddings is 82", "82"]),
        (
            "bert",
            |f| write(f, "1_Pooling/config.json", &json!({"pooling_mode_max_tokens": true})),
            &["1_Pooling/config.json", "max_tokens", "mean_tokens"],
        ),
        ("bert", |f| write(f, "modules.json", &json!([module("LSTM", "2_LSTM")])), &["modules.json", "LSTM"]),
        (
            "bert",
            |f| write(f, "modules.json", &json!([module("Dense", "../2_Dense")])),
            &["no such file", "sentence-transformers"],
        ),
        (
            "bert",
            |f| {
                write(f, "modules.json", &json!([module("Dense", "2_Dense")]));
                write(f, "2_Dense/config.json", &json!({"in_features": 64, "out_features": 32}));
            },
            &["in_features is 64", "given 48"],
        ),
    ];
    for (name, damage, parts) in cases {
        read(copy(name).path()).expect("it is good");
        let folder = copy(name);
        damage(folder.path());
        let error = read(folder.path()).expect_err(parts[0]).to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} are not in {error}");
    }
}

#[test]
fn the_files_of_sentence_transformers_decide_pooling_width_and_length() {
    let folder = copy("bert");
    let at = folder.path();
    config(at, "architectures", Value::Null);
    assert_eq!(read(at).expect("good").spec.encoder.expect("an encoder").pooling, Pooling::Mean);
    write(
        at,
        "1_Pooling/config.json",
        &json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}),
    );
    write(at, "sentence_bert_config.json", &json!({"max_seq_length": 64, "do_lower_case": false}));
    let modules = [module("Transformer", ""), module("Pooling", "1_Pooling"), module("Dense", "2_Dense")];
    write(at, "modules.json", &json!(modules));
    write(
        at,
        "2_Dense/config.json",
        &json!({"in_features": 48, "out_features": 32, "bias": false, "activation_function": "torch.nn.modules.linear.Identity"}),
    );
    let bytes: Vec<u8> = (0..32 * 48).flat_map(|i| (i as f32 / 1536.0).to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![32, 48], &bytes)
        .expect("a tensor");
    let tensors = [("linear.weight", view)];
    safetensors::serialize_to_file(tensors, None, &at.join("2_Dense/model.safetensors")).expect("written");
    let spec = read(at).expect("good").spec;
    assert_eq!((spec.result_width(), spec.context), (32, 64));
    assert_eq!(spec.encoder.expect("an encoder").pooling, Pooling::FirstToken);
    fs::write(at.join("2_Dense/model.safetensors"), &bytes[..100]).expect("written");
    let error = read(at).expect_err("damaged").to_string();
    assert!(error.contains("2_Dense/model.safetensors"), "{error}");
}
