//! Logits against MLX-LM, for every architecture and weight format, on one rank and on several.
//!
//! The fixtures and how they were made: tests/golden/README.md.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_collectives::Group;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Overlap, Step};
use thunder_model::spec::{LayerSpec, MixerSpec};
use thunder_model::{Capacity, ExpertSplit, Model, ModelFolder, Parallelism, ShardPlan};

use crate::common::{self, Golden, check, compare, limits, logits, sharded_logits};

fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn folders_in(name: &str) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(golden_folder().join(name)).unwrap().map(|entry| entry.unwrap().path())
}

fn cases() -> Vec<PathBuf> {
    let mut cases: Vec<_> = folders_in("cases").collect();
    cases.sort();
    assert!(cases.len() >= 30, "the fixtures are there");
    cases
}

/// MLX-LM's results for a case.
fn golden(case: &Path) -> Vec<Golden> {
    common::golden(&case.join("golden.safetensors"), "logits")
}

/// All prompts' logits, computed together on one rank: each step computes the next `chunk` tokens
/// of each unfinished prompt.
fn batched_logits(
    golden: &[Golden],
    folder: &ModelFolder,
    plan: &ShardPlan,
    activations: Activations,
    chunk: usize,
) -> Vec<Vec<f32>> {
    let mut backend = CpuBackend::new(&CpuConfig::new(2, Isa::detect().unwrap(), activations), Group::solo());
    let blocks = 70usize.div_ceil(KV_BLOCK_TOKENS);
    let slots = golden.len();
    let capacity = Capacity {
        rows: slots * 70,
        logit_rows: slots * 70,
        kv_blocks: slots * blocks,
        slots,
        kv_format: KvFormat::F16,
    };
    let mut model =
        Model::load(folder, plan, 0, capacity, &mut backend, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let (mut all, mut rows) = (vec![Vec::new(); slots], Vec::new());
    for start in (0..70).step_by(chunk) {
        let piece = |slot: usize| {
            let tokens = &golden[slot].tokens;
            &tokens[start.min(tokens.len())..tokens.len().min(start + chunk)]
        };
        let mut order: Vec<usize> = (0..slots).filter(|&slot| !piece(slot).is_empty()).collect();
        // Single tokens come first, as a scheduler orders them.
        order.sort_by_key(|&slot| piece(slot).len() > 1);
        let mut step = Step::default();
        for &slot in &order {
            let mine: Vec<u32> = (0..blocks).map(|block| (block * slots + slot) as u32).collect();
            step.push(piece(slot), start, &mine, slot, false);
        }
        step.logit_rows = (0..step.rows() as u32).collect();
        model.forward(&mut backend, &step, None).unwrap();
        model.read_logits(&mut backend, &step, &mut rows).unwrap();
        let vocab = rows.len() / step.rows();
        for (sequence, &slot) in step.sequences.iter().zip(&order) {
            let of_rows = sequence.rows.start * vocab..sequence.rows.end * vocab;
            all[slot].extend_from_slice(&rows[of_rows]);
        }
    }
    all
}

/// True if rounded activations may change which experts a token uses, or which tokens it attends
/// to.
fn may_reroute(folder: &ModelFolder, activations: Activations) -> bool {
    let selects = |mixer: &MixerSpec| match mixer {
        MixerSpec::Latent(shape) => shape.selection.is_some(),
        MixerSpec::Compressed(shape) => shape.compression.is_some_and(|of| of.selection.is_some()),
        _ => false,
    };
    let routes = |layer: &LayerSpec| layer.feed_forward.experts().is_some() || selects(&layer.mixer);
    let rounds = !matches!(activations, Activations::Int16 | Activations::F32);
    rounds_caches(folder) || (rounds && folder.spec.layers.iter().any(routes))
}

/// True if cached vectors are rounded to few bits: a number that is nearly halfway between two of
/// them may become either, regardless of the activations.
fn rounds_caches(folder: &ModelFolder) -> bool {
    let rounds = |layer: &LayerSpec| matches!(&layer.mixer, MixerSpec::Compressed(shape) if shape.rounds);
    folder.spec.layers.iter().any(rounds)
}

/// Largest relative error over all positions of a model that [`rounds_caches`].
const ROUNDED_ERROR: f64 = 1e-2;

#[test]
fn one_rank_agrees_with_mlx() {
    for case in cases() {
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        for (activations, what) in [
            (Activations::Auto, "auto"),
            (Activations::Bf16, "bf16"),
            (Activations::Int16, "int16"),
            (Activations::Int8, "int8"),
        ] {
            let ours =
                logits(&golden(&case), &folder, &plan, Group::solo(), (activations, Overlap::Auto), 70);
            let result = compare(&golden(&case), &ours, may_reroute(&folder, activations));
            check(&case, what, result, limits(activations));
            if rounds_caches(&folder) && activations == Activations::Int16 {
                let (error, same) = compare(&golden(&case), &ours, false);
                check(&case, "all positions", (error, same), (ROUNDED_ERROR, 0.99));
            }
        }
    }
}

#[test]
fn token_by_token_and_batched_gives_the_bits_of_the_whole_prompt() {
    for name in [
        "qwen3-4bit-g64",
        "mistral-bf16-window",
        "ministral3-bf16",
        "llama-6bit-g32",
        "qwen3_next-4bit",
        "qwen3_5-4bit-wrapped",
        "transformers-qwen3_5_moe",
        "minimax_m2-4bit",
        "olmo3-4bit",
        "transformers-gemma3_text",
        "transformers-gemma2",
        "transformers-gemma4_text",
        "transformers-cohere",
        "transformers-llama4",
        "transformers-mistral4",
        "transformers-hunyuan_v1_dense",
        "transformers-glm_moe_dsa",
        "transformers-deepseek_v4",
        "deepseek_v41-4bit",
        "deepseek_v41-engram",
        "transformers-glm5_next",
        "transformers-kimi_linear",
        "transformers-nemotron_h",
        "transformers-nemotron_h_latent",
        "nemotron_h-4bit",
        "transformers-gemma4_experts",
        "gemma4_experts-4bit",
        "kimi_k3-4bit",
        "kimi_k3-mxfp4-published",
        "transformers-mimo_v2_flash",
        "transformers-granitemoehybrid",
        "transformers-granitemoehybrid_dense",
        "granitemoehybrid-4bit",
        "transformers-lfm2",
        "transformers-lfm3",
        "lfm2_moe-4bit",
    ] {
        let case = cases().into_iter().find(|case| case.ends_with(name)).unwrap();
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let whole =
            logits(&golden(&case), &folder, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), 70);
        for chunk in [1, 13, 70] {
            assert_eq!(
                whole,
                logits(
                    &golden(&case),
                    &folder,
                    &plan,
                    Group::solo(),
                    (Activations::Int16, Overlap::Auto),
                    chunk
                ),
                "{name} by {chunk}"
            );
            let batched = batched_logits(&golden(&case), &folder, &plan, Activations::Int16, chunk);
            assert!(whole == batched, "{name}, all prompts together by {chunk}");
        }
    }
}

#[test]
fn any_number_of_ranks_and_any_split_agree_with_mlx() {
    let splits: [&[f64]; 6] = [&[1.0; 2], &[3.0, 1.0], &[1.0; 3], &[1.0, 0.2, 2.0], &[1.0; 4], &[1.0; 5]];
    for (index, case) in cases().iter().enumerate() {
        let folder = ModelFolder::open(case).unwrap();
        // All cases with all splits would take minutes, so each case uses one of them in turn.
        let count = if thunder_testing::is_long() { splits.len() } else { 1 };
        for weights in splits.into_iter().cycle().skip(index).take(count) {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            for activations in [Activations::Int16, Activations::Bf16, Activations::Auto] {
                let [ours, in_halves] = [Overlap::Never, Overlap::Always]
                    .map(|overlap| sharded_logits(&golden(case), &folder, &plan, (activations, overlap), 45));
                assert_eq!(ours, in_halves, "{}, {weights:?}: sums in the background", case.display());
                let result = compare(&golden(case), &ours, may_reroute(&folder, activations));
                check(case, &format!("{weights:?}"), result, limits(activations));
            }
        }
    }
}

#[test]
fn every_case_agrees_on_two_three_and_five_ranks() {
    let arithmetic = (Activations::Int16, Overlap::Never);
    for case in cases() {
        let folder = ModelFolder::open(&case).unwrap();
        for ranks in [2, 3, 5] {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
            let ours = sharded_logits(&golden(&case), &folder, &plan, arithmetic, 45);
            let result = compare(&golden(&case), &ours, may_reroute(&folder, arithmetic.0));
            check(&case, &format!("{ranks} ranks"), result, limits(arithmetic.0));
        }
    }
}

/// DeepSeek V4's groups of heads are not divided, so two of five ranks have none here.
#[test]
fn models_with_several_residual_streams_agree_on_any_number_of_ranks() {
    let names =
        ["transformers-deepseek_v4", "deepseek_v41-4bit", "deepseek_v41-engram", "transformers-glm5_next"];
    for (name, ranks) in [1, 2, 3, 5].into_iter().flat_map(|ranks| names.map(|name| (name, ranks))) {
        let case = cases().into_iter().find(|case| case.ends_with(name)).unwrap();
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
        for chunk in [1, 45] {
            let arithmetic = (Activations::Int16, Overlap::Auto);
            let ours = sharded_logits(&golden(&case), &folder, &plan, arithmetic, chunk);
            let result = compare(&golden(&case), &ours, rounds_caches(&folder));
            check(&case, &format!("{ranks} ranks by {chunk}"), result, limits(Activations::Int16));
        }
    }
}

/// It still takes part in the sums of the other ranks' lookups.
#[test]
fn a_rank_may_have_no_rows_of_tables() {
    let case = cases().into_iter().find(|case| case.ends_with("deepseek_v41-engram")).unwrap();
    let folder = ModelFolder::open(&case).unwrap();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 0.01]).unwrap();
    let footprints = thunder_model::model::shard_footprints(&folder, &plan, KvFormat::F16).unwrap();
    assert_eq!(footprints[1].table_bytes, 0, "the second rank has no rows");
    let ours = sharded_logits(&golden(&case), &folder, &plan, (Activations::Int16, Overlap::Auto), 45);
    let result = compare(&golden(&case), &ours, rounds_caches(&folder));
    check(&case, "no rows", result, limits(Activations::Int16));
}

#[test]
fn experts_may_be_held_whole() {
    for (name, ranks) in [
        ("qwen3_moe-4bit", 3),
        ("gpt_oss-mxfp4", 2),
        ("transformers-gpt_oss", 5),
        ("transformers-llama4", 2),
        ("transformers-deepseek_v4", 3),
        ("deepseek_v41-4bit", 2),
        ("deepseek_v41-engram", 3),
        ("transformers-glm5_next", 2),
        ("transformers-qwen3_vl_moe_text", 4),
        ("deepseek_v3-4bit-g32", 5),
        ("transformers-gemma4_experts", 3),
        ("kimi_k3-4bit", 2),
    ] {
        let case = cases().into_iter().find(|case| case.ends_with(name)).unwrap();
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
        let plan = plan.with_experts(ExpertSplit::Whole);
        let arithmetic = (Activations::Int16, Overlap::Auto);
        let ours = sharded_logits(&golden(&case), &folder, &plan, arithmetic, 45);
        let result = compare(&golden(&case), &ours, rounds_caches(&folder));
        check(&case, &format!("whole, {ranks}"), result, limits(Activations::Int16));
    }
}

#[test]
fn layers_with_several_reductions_are_divided_by_2_3_and_5_ranks() {
    for name in [
        "gemma4_experts-4bit",
        "transformers-gemma4_experts",
        "kimi_k3-4bit",
        "transformers-mimo_v2_flash",
        // One group of heads, whose norm is over all ranks.
        "transformers-granitemoehybrid",
        "granitemoehybrid-4bit",
        "transformers-granitemoehybrid_dense",
        // Channels of convolutions, and gates of heads.
        "transformers-lfm3",
        "lfm2-4bit",
    ] {
        let case = cases().into_iter().find(|case| case.ends_with(name)).unwrap();
        let folder = ModelFolder::open(&case).unwrap();
        for ranks in [2, 3, 5] {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
            let ours =
                sharded_logits(&golden(&case), &folder, &plan, (Activations::Int16, Overlap::Auto), 45);
            let result = compare(&golden(&case), &ours, false);
            check(&case, &format!("{ranks} ranks"), result, limits(Activations::Int16));
        }
    }
}

/// Logits of a pipeline. Its stages are computed one after the other, in pieces of 13 tokens.
fn pipeline_logits(golden: &[Golden], folder: &ModelFolder, plan: &ShardPlan) -> Vec<Vec<f32>> {
    let config = CpuConfig::new(1, Isa::detect().unwrap(), Activations::Int16);
    let capacity = Capacity { rows: 70, logit_rows: 70, kv_blocks: 8, slots: 2, kv_format: KvFormat::F16 };
    let mut stages: Vec<_> = (0..plan.ranks())
        .map(|rank| {
            let mut backend = CpuBackend::new(&config, Group::solo());
            let go_on = &mut |_, _| ControlFlow::Continue(());
            (Model::load(folder, plan, rank, capacity, &mut backend, go_on).unwrap(), backend)
        })
        .collect();
    let (mut hidden, mut rows) = (Vec::new(), Vec::new());
    let mut of_prompt = |golden: &Golden| {
        let (blocks, mut all) = (Vec::from_iter(0..8), Vec::new());
        for (index, tokens) in golden.tokens.chunks(13).enumerate() {
            let mut step = Step::default();
            step.push(tokens, index * 13, &blocks, 0, false);
            step.logit_rows = (0..tokens.len() as u32).collect();
            for (stage, (model, backend)) in stages.iter_mut().enumerate() {
                assert!(stage == 0 || hidden.len() == tokens.len() * model.hidden_width(folder.spec.hidden));
                let before: Option<&[f32]> = (stage > 0).then_some(&hidden);
                model.forward(backend, &step, before).unwrap();
                model.read_hidden(backend, &step, &mut hidden).unwrap();
            }
            let (model, backend) = stages.last_mut().unwrap();
            model.read_logits(backend, &step, &mut rows).unwrap();
            all.extend_from_slice(&rows);
        }
        all
    };
    golden.iter().map(&mut of_prompt).collect()
}

#[test]
fn the_stages_of_a_pipeline_compute_the_whole_model() {
    for (name, ranks) in [
        ("kimi_k3-4bit", 2),
        ("kimi_k3-4bit", 3),
        ("kimi_k3-mxfp4-published", 5),
        ("transformers-gemma4_experts", 2),
    ] {
        let case = cases().into_iter().find(|case| case.ends_with(name)).unwrap();
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Pipeline, &vec![1.0; ranks]).unwrap();
        let ours = pipeline_logits(&golden(&case), &folder, &plan);
        let result = compare(&golden(&case), &ours, false);
        check(&case, &format!("{ranks} stages"), result, limits(Activations::Int16));
    }
}

/// Wrapped checkpoints put the text model under other prefixes, and some do not say whether the
/// head is the embedding.
#[test]
fn a_wrapped_checkpoint_finds_its_head() {
    let case = cases().into_iter().find(|case| case.ends_with("llama-f32")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(case.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(case.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert!(file.names().contains(&"lm_head.weight"), "the case is untied");
    let whole = ModelFolder::open(&case).unwrap();
    let plan = ShardPlan::new(&whole.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let expected =
        logits(&golden(&case), &whole, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), 70);
    for (inner, head) in
        [("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head")]
    {
        let rename = |name: &str| match name.strip_prefix("model.") {
            Some(rest) => format!("{inner}{rest}"),
            None => name.replace("lm_head", head),
        };
        let renamed: Vec<_> = file.tensors().into_iter().map(|(name, view)| (rename(&name), view)).collect();
        safetensors::serialize_to_file(renamed, None, &dir.path().join("model.safetensors")).unwrap();
        let folder = ModelFolder::open(dir.path()).unwrap();
        let ours =
            logits(&golden(&case), &folder, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), 70);
        assert!(ours == expected, "{inner} and {head}");
    }
}

/// Folders, a text of their config.json, and what replaces it: another name of the model.
const OTHER_NAMES: [(&str, &str, &str); 15] = [
    ("cases/transformers-youtu", r#""youtu""#, r#""youtu_llm""#),
    ("cases/transformers-kimi_k25", r#""kimi_k25""#, r#""kimi_vl""#),
    ("cases/transformers-kimi_k25", r#""deepseek_v3""#, r#""kimi_k2""#),
    ("cases/transformers-deepseek_v3", r#""deepseek_v3""#, r#""joyai_llm_flash""#),
    ("cases/transformers-glm4v", r#""glm4v""#, r#""glm46v""#),
    ("cases/transformers-exaone4_5", r#""exaone4""#, r#""exaone4_5_text""#),
    ("cases/transformers-qwen2_vl", r#""qwen2_vl_text""#, r#""qwen2_vl""#),
    ("cases/transformers-qwen2_5_vl", r#""qwen2_5_vl_text""#, r#""qwen2_5_vl""#),
    ("cases/transformers-qwen3", r#""qwen3""#, r#""qwen3_vl""#),
    ("cases/transformers-qwen3", r#""qwen3""#, r#""qwen3_vl_text""#),
    ("cases/transformers-qwen3_vl_moe_text", r#""qwen3_vl_moe_text""#, r#""qwen3_vl_moe""#),
    ("cases/transformers-llama", r#""llama""#, r#""ministral""#),
    // MLX-LM, too, has one class for both.
    ("cases/deepseek_v41-4bit", r#""deepseek_v41""#, r#""deepseek_v41_text""#),
    ("encoders/xlm-roberta", r#""xlm-roberta""#, r#""roberta""#),
    ("encoders/xlm-roberta", r#""xlm-roberta""#, r#""camembert""#),
];

#[test]
fn other_names_of_a_model_give_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    for (case, from, to) in OTHER_NAMES {
        let case = golden_folder().join(case);
        let config = std::fs::read_to_string(case.join("config.json")).unwrap();
        assert!(config.contains(from), "{}: {from}", case.display());
        std::fs::write(folder.path().join("config.json"), config.replace(from, to)).unwrap();
        std::fs::copy(case.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let [mut named, tested] = [folder.path(), &case].map(|path| ModelFolder::open(path).unwrap().spec);
        named.family.clone_from(&tested.family);
        assert_eq!(named, tested, "{to}");
    }
}

/// Each supported `model_type` is that of a folder with another library's results, or another name
/// of such a model.
#[test]
fn every_supported_name_is_tested() {
    let mut tested: Vec<String> =
        OTHER_NAMES.iter().map(|(_, _, name)| name.trim_matches('"').to_owned()).collect();
    for case in folders_in("cases").chain(folders_in("encoders")) {
        let config = std::fs::read_to_string(case.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        for config in [Some(&config), config.get("text_config")].into_iter().flatten() {
            tested.extend(config["model_type"].as_str().map(str::to_owned));
        }
    }
    let known = thunder_model::arch::known();
    let left: Vec<_> = known.filter(|name| tested.iter().all(|tested| tested != name)).collect();
    assert!(left.is_empty(), "no folder has the model_type {left:?}");
}

/// A matrix that is counted twice would end the progress of a load early.
#[test]
fn loads_read_as_many_bytes_as_they_announce() {
    let config = CpuConfig::new(1, Isa::detect().unwrap(), Activations::Auto);
    let capacity = Capacity { rows: 1, logit_rows: 1, kv_blocks: 1, slots: 1, kv_format: KvFormat::F16 };
    for case in cases().into_iter().chain(folders_in("formats/cases")) {
        let folder = ModelFolder::open(&case).unwrap();
        for ranks in [1, 3] {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
            let mut backend = CpuBackend::new(&config, Group::solo());
            let mut last = (0, 0);
            let mut progress = |done, total| {
                last = (done, total);
                ControlFlow::Continue(())
            };
            Model::load(&folder, &plan, ranks - 1, capacity, &mut backend, &mut progress).unwrap();
            assert_eq!(last.0, last.1, "{}, {ranks} ranks", case.display());
        }
    }
}

#[test]
fn interleaved_stacks_of_experts_count_once() {
    let case = cases().into_iter().find(|case| case.ends_with("transformers-gpt_oss")).unwrap();
    let bytes = std::fs::read(case.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut matrices, mut stacks) = (0, 0);
    for (_, tensor) in file.tensors().iter().filter(|(name, _)| !name.ends_with("bias")) {
        let bytes = tensor.data().len() as u64;
        matrices += if tensor.shape().len() > 1 { bytes } else { 0 };
        stacks += if tensor.shape().len() == 3 { bytes } else { 0 };
    }
    let folder = ModelFolder::open(&case).unwrap();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let footprint = thunder_model::model::shard_footprints(&folder, &plan, KvFormat::F16).unwrap().remove(0);
    assert_eq!(footprint.routed_bytes, stacks);
    assert_eq!((footprint.file_bytes, footprint.weight_bytes), (matrices, matrices));
    let idle = stacks / 5 * 3;
    let read = matrices - footprint.lookup_bytes - idle;
    assert!(footprint.read_bytes(1).abs_diff(read) <= 1, "two of five experts are read");
}
