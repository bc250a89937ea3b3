//! Low-rank adapters: logits against PEFT, on one rank and on several, and adapters that are
//! refused.
//!
//! The fixtures and how they were made: tests/golden/README.md.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Overlap, Step};
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan};

use crate::common::{check, compare, golden, limits, sharded_logits};

/// Adapters, and the case that each is for.
const ADAPTERS: [(&str, &str); 5] = [
    ("llama-all", "llama-4bit-g32"),
    ("llama-some", "llama-4bit-g32"),
    ("llama-mlx", "llama-4bit-g32"),
    ("olmo2-all", "transformers-olmo2"),
    ("phi3-fused", "transformers-phi3"),
];

fn fixture(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(folder).join(name)
}

fn adapted(base: &str, adapters: &[&str]) -> ModelFolder {
    let mut folder = ModelFolder::open(&fixture("cases", base)).unwrap();
    for name in adapters {
        folder.add_adapter(name, &fixture("adapters", name)).unwrap();
    }
    folder
}

#[test]
fn any_number_of_ranks_agrees_with_peft() {
    for (name, base) in ADAPTERS {
        let case = fixture("adapters", name);
        let golden = golden(&case.join("golden.safetensors"), "logits");
        let folder = adapted(base, &[name]);
        let splits: [&[f64]; 4] = [&[1.0], &[3.0, 1.0], &[1.0; 3], &[1.0; 4]];
        for weights in splits {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            // Of bytes, see below.
            for activations in [Activations::Int16, Activations::Bf16] {
                let [ours, in_halves] = [Overlap::Never, Overlap::Always]
                    .map(|overlap| sharded_logits(&golden, &folder, &plan, (activations, overlap), 45));
                assert_eq!(ours, in_halves, "{name}, {weights:?}: sums in the background");
                let result = compare(&golden, &ours, false);
                check(&case, &format!("{weights:?} {activations:?}"), result, limits(activations));
            }
        }
    }
}

/// Measured: 0.8 to 1.3 %, and 0.6 % without an adapter. The fixtures' random adapters are as
/// strong as the weights, so the limit is twice that of models.
#[test]
fn bytes_of_activations_cost_adapters_two_percent_at_most() {
    for (name, base) in ADAPTERS {
        let golden = golden(&fixture("adapters", name).join("golden.safetensors"), "logits");
        let folder = adapted(base, &[name]);
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let [exact, bytes] = [Activations::Int16, Activations::Auto].map(|activations| {
            sharded_logits(&golden, &folder, &plan, (activations, Overlap::Never), 45).concat()
        });
        let square = |x: f32| f64::from(x).powi(2);
        let error: f64 = exact.iter().zip(&bytes).map(|(a, b)| square(a - b)).sum();
        let error = (error / exact.iter().copied().map(square).sum::<f64>()).sqrt();
        println!("{name}: {error:.1e}");
        assert!(error < 2.0 * limits(Activations::Auto).0, "{name}: {error:.2e}");
    }
}

/// The logits of all sequences' tokens, each `(adapter, tokens)`, in one step or each alone.
fn of_sequences(
    folder: &ModelFolder,
    plan: &ShardPlan,
    group: Group,
    sequences: &[(u32, &[u32])],
    together: bool,
) -> Vec<f32> {
    let rank = group.rank();
    let config = CpuConfig::new(1, Isa::detect().unwrap(), Activations::Auto);
    let mut backend = CpuBackend::new(&config, group);
    let slots = sequences.len();
    let capacity = Capacity { rows: 64, logit_rows: 64, kv_blocks: slots, slots, kv_format: KvFormat::F16 };
    let mut load = |_, _| ControlFlow::Continue(());
    let mut model = Model::load(folder, plan, rank, capacity, &mut backend, &mut load).unwrap();
    let (mut all, mut rows) = (Vec::new(), Vec::new());
    for group in sequences.chunks(if together { slots } else { 1 }) {
        let mut step = Step::default();
        for (adapter, tokens) in group {
            let slot = step.sequences.len();
            step.push(tokens, 0, &[slot as u32], slot, false);
            step.sequences[slot].adapter = *adapter;
        }
        step.logit_rows = (0..step.rows() as u32).collect();
        model.forward(&mut backend, &step, None).unwrap();
        model.read_logits(&mut backend, &step, &mut rows).unwrap();
        all.extend_from_slice(&rows);
    }
    all
}

#[test]
fn sequences_with_different_adapters_share_a_step() {
    let names = ["llama-all", "llama-some", "llama-mlx"];
    let folder = adapted("llama-4bit-g32", &names);
    let plain = adapted("llama-4bit-g32", &[]);
    let tokens: Vec<u32> = (1..12).collect();
    // Generated tokens first. Neighbouring rows share an adapter, and rows without an adapter are
    // in between.
    let sequences: [(u32, &[u32]); 7] = [
        (1, &tokens[..1]),
        (0, &tokens[..1]),
        (3, &tokens[2..3]),
        (2, &tokens[..]),
        (2, &tokens[3..]),
        (0, &tokens[..]),
        (1, &tokens[..]),
    ];
    for ranks in 1..=3 {
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
        let run = |folder: &ModelFolder, sequences: &[(u32, &[u32])], together: bool| {
            local::run(ranks, TransportChoice::Shm, |group| {
                of_sequences(folder, &plan, group, sequences, together)
            })
            .unwrap()
        };
        let alone = run(&folder, &sequences, false);
        assert!(alone == run(&folder, &sequences, true), "{ranks} ranks");
        let without: Vec<_> = sequences.map(|(_, tokens)| (0, tokens)).into();
        let base = run(&plain, &without, true);
        let vocab = base[0].len() / sequences.iter().map(|(_, tokens)| tokens.len()).sum::<usize>();
        let mut row = 0;
        for (adapter, tokens) in sequences {
            let of = |all: &[f32]| all[row * vocab..(row + tokens.len()) * vocab].to_vec();
            assert_eq!(of(&alone[0]) == of(&base[0]), adapter == 0, "adapter {adapter}, {ranks} ranks");
            row += tokens.len();
        }
    }
}

/// The error for an adapter with changed files.
fn refused(base: &str, name: &str, change: impl FnOnce(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("adapters", name)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    change(dir.path());
    let mut folder = ModelFolder::open(&fixture("cases", base)).unwrap();
    folder.add_adapter("a", dir.path()).unwrap_err().to_string()
}

#[test]
fn adapters_that_cannot_be_used_are_refused_by_name() {
    let set = |field: &'static str, value: serde_json::Value| {
        move |folder: &Path| {
            let path = folder.join("adapter_config.json");
            let mut config: serde_json::Value =
                serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            config[field] = value;
            std::fs::write(path, config.to_string()).unwrap();
        }
    };
    let remove = |name: &'static str| move |folder: &Path| std::fs::remove_file(folder.join(name)).unwrap();
    let rename = |from: &'static str, to: &'static str| {
        move |folder: &Path| {
            let path = folder.join("adapter_model.safetensors");
            let bytes = std::fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let named: Vec<_> =
                file.tensors().into_iter().map(|(name, view)| (name.replace(from, to), view)).collect();
            safetensors::serialize_to_file(named, None, &path).unwrap();
        }
    };
    type Change = Box<dyn FnOnce(&Path)>;
    let cases: Vec<(&str, Change, &str)> = vec![
        ("llama-all", Box::new(remove("adapter_config.json")), "no adapter_config.json"),
        ("llama-all", Box::new(remove("adapter_model.safetensors")), "no adapter_model.safetensors"),
        ("llama-mlx", Box::new(remove("adapters.safetensors")), "no adapters.safetensors"),
        ("llama-all", Box::new(set("use_dora", true.into())), "use_dora is true"),
        ("llama-all", Box::new(set("bias", "all".into())), "bias is \"all\""),
        ("llama-all", Box::new(set("peft_type", "IA3".into())), "peft_type is \"IA3\""),
        ("llama-all", Box::new(set("modules_to_save", vec!["lm_head"].into())), "modules_to_save"),
        ("llama-all", Box::new(set("alpha_pattern", serde_json::json!({"^q": 1}))), "\"^q\""),
        ("llama-all", Box::new(rename("mlp.up_proj", "mlp.experts.0.up_proj")), "experts.0.up_proj"),
        ("llama-all", Box::new(rename("layers.1", "layers.7")), "2 layers"),
        (
            "llama-all",
            Box::new(rename("0.mlp.up_proj.lora_B", "0.mlp.up_proj.lora_C")),
            "lora_B.weight\" is missing",
        ),
        ("llama-all", Box::new(rename("0.mlp.up_proj.lora_", "0.mlp.up_proj.other_")), "up_proj.other_A"),
        ("llama-all", Box::new(rename("0.mlp.up_proj.lora_B", "0.mlp.down.lora_B")), "no \"base_model"),
        ("olmo2-all", Box::new(|_| {}), "another model"),
        (
            "llama-all",
            Box::new(|folder| std::fs::write(folder.join("adapter_config.json"), "{").unwrap()),
            "EOF",
        ),
    ];
    for (name, change, words) in cases {
        let error = refused("llama-4bit-g32", name, change);
        assert!(error.contains(words), "{words:?} is not in {error:?}");
    }
}
