use std::path::PathBuf;

use tempfile::TempDir;
use thunder_collectives::Group;
use thunder_compute::{Activations, CacheKind, CacheShape, CpuBackend, CpuConfig, Device, Isa, KvFormat};

use super::*;
use crate::model::shard_footprints;
use crate::spec::MixerSpec;
use crate::unread::unread_tensors;
use crate::weights::Role;
use crate::{ModelFolder, Parallelism, ShardPlan};

fn tiny() -> Shape {
    Shape::named("qwen3-tiny").expect("it is listed")
}

/// A written folder. It is deleted with the first value.
fn written(shape: &Shape, quantization: Quantization, shard_bytes: u64) -> (TempDir, PathBuf) {
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = temporary.path().join("model");
    let layout = Layout::new(shape, quantization, 7, shard_bytes).expect("a layout");
    let mut last = (0, 1);
    layout.write(&folder, &mut |done, total| last = (done, total)).expect("written");
    let on_disk: u64 = fs::read_dir(&folder)
        .expect("a folder")
        .map(|f| f.expect("a file").metadata().expect("its size").len())
        .sum();
    assert_eq!(last, (on_disk, on_disk), "progress ends at what lies on the disk");
    (temporary, folder)
}

/// Writes and opens a folder; the ranks' weight bytes must add up to the bytes of its weights.
fn check(shape: &Shape, quantization: Quantization, shard_bytes: u64, files: usize) {
    let (_temporary, path) = written(shape, quantization, shard_bytes);
    let weight_files = fs::read_dir(&path)
        .expect("a folder")
        .filter(|f| f.as_ref().expect("a file").path().extension().is_some_and(|end| end == "safetensors"));
    assert_eq!(weight_files.count(), files, "{shape:?} {quantization:?}");
    let folder = ModelFolder::open(&path).expect("it opens");
    let (h, c, d) = (shape.hidden, shape.channels, shape.head_dim);
    let layer = h * d * (2 * shape.heads + 2 * shape.kv_heads) + 3 * h * c;
    assert_eq!(folder.spec.layer_weights(), (shape.layers * layer) as u64, "{shape:?}");
    let elements = shape.layers * layer + shape.vocab * h * if shape.tied { 1 } else { 2 };
    let bytes = match quantization {
        Some((bits, group)) => elements * bits as usize / 8 + elements / group * 4,
        None => 2 * elements,
    };
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0]).expect("a plan");
    let footprints = shard_footprints(&folder, &plan, KvFormat::F16)
        .expect("every tensor is there and of the right shape");
    assert_eq!(footprints.iter().map(|rank| rank.weight_bytes).sum::<u64>(), bytes as u64);
}

#[test]
fn every_format_opens_and_has_the_right_size() {
    for tied in [true, false] {
        let shape = Shape { tied, ..tiny() };
        check(&shape, None, SHARD_BYTES, 1);
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                check(&shape, Some((bits, group)), SHARD_BYTES, 1);
            }
        }
    }
}

#[test]
fn files_are_cut_at_the_limit() {
    // The embedding alone exceeds the limit.
    check(&tiny(), Some((4, 64)), 100_000, 10);
    check(&Shape { tied: true, ..tiny() }, None, 1_000_000, 3);
}

#[test]
fn every_family_has_the_tensors_that_loading_asks_for() {
    for (model_type, stretch) in [
        ("llama", Stretch::Llama3 { factor: 8.0 }),
        ("mistral", Stretch::None),
        ("ministral3", Stretch::Yarn { factor: 16.0 }),
        ("qwen2", Stretch::None),
    ] {
        check(&Shape { model_type, stretch, ..tiny() }, Some((4, 32)), SHARD_BYTES, 1);
    }
}

/// Exactly the requested tensors exist.
#[test]
fn later_families_have_the_tensors_that_loading_asks_for() {
    let dense =
        ["gemma3_text", "phi3", "olmo2", "olmo3", "granite", "glm4", "exaone4", "qwen3_vl_text", "ministral"];
    let shapes = dense.map(|model_type| Shape { model_type, stretch: Stretch::None, ..tiny() });
    let experts = r#"{ "num_local_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": true }"#;
    let minimax = Shape { model_type: "minimax_m2", more: experts, ..tiny() };
    let next = Shape::named("qwen3-next-tiny").expect("it is listed");
    let nemotron = Shape::named("nemotron-tiny").expect("it is listed");
    let gemma4 = Shape {
        model_type: "gemma4_text",
        more: r#"{ "hidden_size_per_layer_input": 0, "global_head_dim": 64, "num_global_key_value_heads": 2,
            "attention_k_eq_v": true, "hidden_activation": "gelu_pytorch_tanh" }"#,
        ..tiny()
    };
    let gemma4_inputs = Shape {
        model_type: "gemma4_text",
        layers: 4,
        more: r#"{ "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 4096, "global_head_dim": 64,
            "sliding_window": 64, "sliding_window_pattern": 2, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": true, "hidden_activation": "gelu_pytorch_tanh" }"#,
        ..tiny()
    };
    let ahead = Shape { ahead: true, ..tiny() };
    let next_ahead = Shape { ahead: true, ..next.clone() };
    let gemma4_experts = Shape {
        model_type: "gemma4_text",
        more: r#"{ "hidden_size_per_layer_input": 0, "global_head_dim": 64, "num_global_key_value_heads": 2,
            "attention_k_eq_v": true, "hidden_activation": "gelu_pytorch_tanh", "enable_moe_block": true,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64 }"#,
        ..tiny()
    };
    // A shared expert and routed ones, together with a state space of one group and with attention.
    let granite4 = Shape {
        model_type: "granitemoehybrid",
        stretch: Stretch::None,
        more: r#"{ "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 32,
            "mamba_d_state": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 128 }"#,
        ..tiny()
    };
    let convolutions = |model_type| Shape {
        model_type,
        stretch: Stretch::None,
        more: r#"{ "layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": false }"#,
        ..tiny()
    };
    // A window, a layer that compresses and chooses, one that reads both; tables in two layers.
    let deepseek41 = Shape {
        model_type: "deepseek_v41",
        stretch: Stretch::None,
        kv_heads: 1,
        more: r#"{ "q_lora_rank": 64, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 64, "sliding_window": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "index_n_heads": 2,
            "index_head_dim": 32, "index_topk": 8, "compress_ratios": [0, 2, 2, 1], "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3], "engram_layer_ids": [0, 2], "engram_num_embeddings": [408, 480],
            "engram_max_ngram_size": 3, "engram_vocab_size": 97, "engram_n_heads": 2, "engram_head_dim": 32,
            "engram_compressed_vocab_size": 255 }"#,
        ..tiny()
    };
    let kimi_k3 = Shape::named("kimi-k3-tiny").expect("it is listed");
    let mimo = Shape {
        model_type: "mimo_v2_flash",
        stretch: Stretch::None,
        more: r#"{ "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "partial_rotary_factor": 0.5, "sliding_window_size": 16, "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1] }"#,
        ..tiny()
    };
    let gpt_oss = Shape {
        model_type: "gpt_oss",
        stretch: Stretch::None,
        more: r#"{ "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": true, "sliding_window": 16,
            "sliding_window_pattern": 2 }"#,
        ..tiny()
    };
    for shape in shapes.into_iter().chain([
        minimax,
        gpt_oss,
        next,
        nemotron,
        granite4,
        gemma4,
        gemma4_experts,
        gemma4_inputs,
        kimi_k3,
        deepseek41,
        convolutions("lfm2"),
        convolutions("lfm3"),
        mimo,
        ahead,
        next_ahead,
    ]) {
        for quantization in [None, Some((4, 32))] {
            let (_temporary, path) = written(&shape, quantization, SHARD_BYTES);
            let folder = ModelFolder::open(&path).expect("it opens");
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 2.0, 1.0]).expect("a plan");
            shard_footprints(&folder, &plan, KvFormat::F16).expect(shape.model_type);
            assert_eq!(unread_tensors(&folder), None, "{}", shape.model_type);
            assert_eq!(folder.spec.ahead.is_some(), shape.ahead, "{}", shape.model_type);
        }
    }
}

#[test]
fn a_changed_field_changes_the_folder() {
    let mut shape = Shape::named("qwen3-moe-tiny").expect("it is listed");
    assert!(shape.set("hidden_size", 8.into()).is_err_and(|reason| reason.contains("num_experts")));
    shape.set("num_experts", 8.into()).expect("it has experts");
    let (_temporary, path) = written(&shape, Some((4, 64)), SHARD_BYTES);
    let folder = ModelFolder::open(&path).expect("it opens");
    let experts = folder.spec.layers[0].feed_forward.experts().expect("a layer with experts");
    assert_eq!((experts.experts, experts.chosen), (8, 4));
}

/// Loading refuses a tokenizer whose tokens have a different count of numbers.
#[test]
fn the_count_of_token_numbers_is_that_of_the_folders_tokenizer() {
    let shape = Shape::named("deepseek-v4.1-flash").expect("it is listed");
    let folder = tempfile::tempdir().expect("a folder");
    for (name, json) in super::text::files(shape.vocab) {
        fs::write(folder.path().join(name), json.to_string()).expect("it is written");
    }
    let tokenizer = crate::tokenizer::Tokenizer::load(folder.path()).expect("it is a tokenizer");
    let (numbers, count) = crate::engram::numbers(&tokenizer).expect("all tokens have numbers");
    let config = shape.config(None, 0);
    assert_eq!(
        (numbers.len(), config["engram_compressed_vocab_size"].as_u64()),
        (shape.vocab, Some(count as u64))
    );
}

/// A token reads only its experts, several tokens more of them, and no step more than all.
#[test]
fn experts_are_read_by_the_tokens_that_take_them() {
    let shape = Shape::named("qwen3-moe-tiny").expect("it is listed");
    let (_temporary, path) = written(&shape, Some((4, 64)), SHARD_BYTES);
    let folder = ModelFolder::open(&path).expect("it opens");
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0]).expect("a plan");
    let footprints = shard_footprints(&folder, &plan, KvFormat::F16).expect("every tensor is there");
    for rank in &footprints {
        let routed = (shape.layers * 16 * 3 * 64 * shape.hidden * 9 / 16) as u64;
        assert_eq!((rank.experts, rank.chosen, rank.routed_bytes), (16, 4, routed));
        // The head is another matrix, so of the embedding a token reads one row.
        let embedding = (rank.vocab.len() * shape.hidden * 9 / 16) as u64;
        assert_eq!(rank.lookup_bytes, embedding);
        assert_eq!(rank.read_bytes(1), rank.weight_bytes - routed * 3 / 4 - embedding);
        assert!(rank.read_bytes(2) > rank.read_bytes(1) && rank.read_bytes(1000) <= rank.weight_bytes);
    }
    // The whole router, and a quarter of the experts.
    let experts = 16 * shape.hidden + 4 * 3 * 128 * shape.hidden;
    let attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads);
    assert_eq!(folder.spec.layer_weights(), (shape.layers * (experts + attention)) as u64);
}

/// An embedding that is also the output head is read whole, by the ranks that compute logits.
#[test]
fn an_embedding_is_read_where_it_is_the_head() {
    for (tied, ahead) in [(true, false), (false, false), (true, true), (false, true)] {
        let shape = Shape { tied, ahead, ..Shape::named("qwen3-next-tiny").expect("it is listed") };
        let (_temporary, path) = written(&shape, None, SHARD_BYTES);
        let folder = ModelFolder::open(&path).expect("it opens");
        let table = (2 * shape.vocab * shape.hidden) as u64;
        for (mode, ranks) in [(Parallelism::Tensor, 1), (Parallelism::Tensor, 2), (Parallelism::Pipeline, 2)]
        {
            let plan = ShardPlan::new(&folder.spec, mode, &vec![1.0; ranks]).expect("a plan");
            let all = shard_footprints(&folder, &plan, KvFormat::F16).expect("every tensor is there");
            let looked_up: Vec<u64> = all.iter().map(|rank| rank.lookup_bytes).collect();
            let expected = match (mode, tied) {
                (Parallelism::Tensor, true) => vec![0; ranks],
                (Parallelism::Tensor, false) => vec![table / ranks as u64; ranks],
                // The last stage embeds the tokens that it predicts, with its head if it can.
                (Parallelism::Pipeline, _) => vec![table, if ahead && !tied { table } else { 0 }],
            };
            assert_eq!(looked_up, expected, "{mode:?}, {ranks} ranks, tied: {tied}, ahead: {ahead}");
        }
    }
}

#[test]
fn every_shape_can_be_laid_out_in_every_common_format() {
    let formats = [None, Some((4, 64)), Some((8, 64)), Some((3, 32))];
    for (index, name) in Shape::names().enumerate() {
        let shape = Shape::named(name).expect("it is listed");
        // A layout takes the time of a vocabulary: each shape in one format here, in all with
        // `./test --long`.
        for quantization in formats.into_iter().cycle().skip(index).take(thunder_testing::runs(1, 4)) {
            Layout::new(&shape, quantization, 0, SHARD_BYTES).expect(name);
        }
    }
}

#[test]
fn shapes_have_the_published_parameter_counts() {
    let counts = [
        // Without the pooler, which was trained for another task.
        ("bge-base", 108_891_648),
        ("bge-m3", 566_705_152),
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("mistral-7b", 7_248_023_552),
        ("mistral-small-24b", 23_572_403_200),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v2-lite", 15_706_484_224),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("minimax-m2", 228_689_764_864),
        ("ernie-4.5-21b-a3b", 21_825_437_888),
        ("phi-4", 14_659_507_200),
        ("glm4-9b", 9_400_279_040),
        // Published without the corrections of the routers' choice, 2944 numbers.
        ("nemotron3-nano-30b-a3b", 31_577_940_288),
        ("nemotron-nano-9b-v2", 8_888_227_328),
        ("granite4-h-small", 32_207_337_984),
        ("granite4-h-tiny", 6_939_037_248),
        ("granite4-h-micro", 3_191_396_096),
    ];
    // Parameters of transformers' classes for the published configs, with the corrections of the
    // routers' choice (5.24; of GLM-5.3-Flash the defaults of Glm5NextTextConfig and a head).
    let by_transformers = [
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("qwen2-57b-a14b", 57_408_658_944),
        ("qwen3-coder-480b-a35b", 480_154_875_392),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("qwen3.5-397b-a17b", 396_346_350_336),
        ("glm-4.6", 352_797_829_024),
        ("glm-4.7-flash", 29_943_393_920),
        ("deepseek-v2", 235_741_434_880),
        ("phi-3-mini", 3_821_079_552),
        ("seed-oss-36b", 36_151_104_512),
        ("smollm3-3b", 3_075_098_624),
        ("olmo2-32b", 32_234_279_936),
        ("olmo3-32b", 32_233_522_176),
        ("hunyuan-7b", 7_504_568_320),
        ("deepseek-v3.2", 671_877_944_064),
        ("glm-5.3-flash", 313_326_828_862),
        ("lfm2-1.2b", 1_170_340_608),
        ("lfm2-8b-a1b", 8_339_930_560),
        ("lfm3-1.7b", 1_728_801_536),
    ];
    for (name, count) in counts.into_iter().chain(by_transformers) {
        assert_eq!(weights_of(&Shape::named(name).expect("it is listed")), count, "{name}");
    }
}

/// Numbers in a shape's tensors.
fn weights_of(shape: &Shape) -> usize {
    let layout = Layout::new(shape, None, 0, SHARD_BYTES).expect("a layout");
    let tensors = layout.shards.iter().flat_map(|shard| &shard.tensors);
    tensors.map(|tensor| tensor.shape.iter().product::<usize>()).sum()
}

/// No exact number is published of these, but rounded ones.
#[test]
fn shapes_have_the_published_sizes() {
    // Billions, as llama.cpp prints them of the published files ("model params", llama-bench).
    let by_llama_cpp = [
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-14b", 14.77),
        ("qwen3-235b-a22b", 235.09),
        ("devstral-123b", 125.03),
        ("deepseek-v3", 671.03),
        ("deepseek-v4-flash", 284.33),
        ("kimi-k2", 1026.41),
        ("kimi-linear-48b-a3b", 49.12),
        ("qwen3.5-27b", 26.90),
        ("llama4-scout", 107.77),
        ("llama4-maverick", 400.71),
        ("hunyuan-a13b", 80.39),
        ("gemma3-4b", 3.88),
        ("gemma3-27b", 27.01),
        ("gemma4-31b", 30.70),
        ("gemma4-26b-a4b", 25.23),
        ("granite-8b", 8.17),
    ];
    // Billions, as their publishers write on model cards or in reports.
    let by_publishers = [
        ("command-r-plus", 104.0, 0.5),
        // And the table of the layers' inputs: 262,144 tokens, 35 layers, 256 numbers.
        ("gemma4-e2b", 2.3 + 2.349, 0.05),
        ("command-a", 111.0, 0.5),
        ("mimo-v2-flash", 309.0, 0.5),
        ("mistral-small-4-119b", 119.0, 0.5),
        // Gemma 2's report: 26,047,480,320 without the embedding, of 256,000 tokens.
        ("gemma2-27b", 26.047_480_320 + 1.179_648, 1e-9),
        // EXAONE 4's card: 30.95 without embeddings.
        ("exaone4-32b", 30.95 + 2.0 * 0.524_288, 5e-3),
    ];
    let all = by_llama_cpp.map(|(name, billions)| (name, billions, 5e-3)).into_iter().chain(by_publishers);
    for (name, billions, within) in all {
        let found = weights_of(&Shape::named(name).expect("it is listed")) as f64 / 1e9;
        assert!((found - billions).abs() <= within, "{name} has {found} billion weights, not {billions}");
    }
    // Includes the layers that predict further tokens, and for some models their copies of
    // embedding and head. DeepSeek's numbers are those of Hugging Face's pages.
    let with_ahead =
        [("glm-4.5-air", 110.47, 2, 5e-3), ("glm-5", 753.86, 0, 5e-3), ("deepseek-v3.2", 685.4, 2, 5e-2)];
    for (name, billions, copies, within) in with_ahead {
        let shape = Shape { ahead: true, ..Shape::named(name).expect("it is listed") };
        let found = (weights_of(&shape) + copies * shape.vocab * shape.hidden) as f64 / 1e9;
        assert!((found - billions).abs() <= within, "{name} has {found} billion weights, not {billions}");
    }
}

/// Golden models are narrow, so only this and a model of true shapes find heads that are too wide.
#[test]
fn the_cpu_attends_with_the_heads_of_every_shape() {
    let config = CpuConfig::new(1, Isa::detect().expect("supported"), Activations::Auto);
    for name in Shape::names() {
        let shape = Shape::named(name).expect("it is listed");
        let config_json = shape.config(None, shape.vocab as u32 - 1);
        let spec = arch::spec(&config_json, Path::new("config.json")).expect("a spec");
        let heads = spec.layers.iter().filter_map(|layer| match &layer.mixer {
            MixerSpec::Attention(of) => Some((of.kv_heads, of.head_dim, of.value_dim)),
            _ => None,
        });
        let caches = heads.map(|(heads, key_dim, value_dim)| CacheKind::Heads { heads, key_dim, value_dim });
        let caches = CacheShape { format: KvFormat::F16, caches: caches.collect(), blocks: 1, slots: 1 };
        let mut backend = CpuBackend::new(&config, Group::solo());
        backend.caches(&caches).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn the_tokenizer_encodes_any_text_and_decodes_every_id() {
    let (_temporary, path) = written(&tiny(), Some((4, 64)), SHARD_BYTES);
    let folder = ModelFolder::open(&path).expect("it opens");
    let tokenizer = folder.tokenizer().expect("a tokenizer");
    let text = "Zwei Macs,\n\ttrois câbles — 四台の機械 🌩️ <|t300|>\0";
    let ids = tokenizer.encode(text, true).expect("tokens");
    assert_eq!(ids.len(), text.len(), "a token a byte");
    assert_eq!(tokenizer.decode(&ids, true), text);
    assert_eq!(folder.spec.eos, [4095]);
    assert!(tokenizer.is_special(4095));
    assert_eq!(tokenizer.encode("a<|end|>", false).expect("tokens"), [97, 4095]);
    for id in 256..4095 {
        assert_eq!(tokenizer.decode(&[id], true), format!("<|t{id}|>"));
    }
    let template = folder.chat_template().expect("a template");
    assert!(template.is_some());
}

/// The embedding's values, by the definition of the format.
fn embedding(folder: &ModelFolder, quantization: Quantization) -> Vec<f64> {
    let shape = [folder.spec.vocab, folder.spec.hidden];
    let table = folder.weights.matrix(Role::Embedding, shape).expect("a matrix");
    let bf16_values = |bytes: &[u8]| -> Vec<f64> {
        let (pairs, _) = bytes.as_chunks::<2>();
        pairs.iter().map(|&pair| half::bf16::from_le_bytes(pair).to_f64()).collect()
    };
    let Some((bits, group)) = quantization else { return bf16_values(table.weight) };
    let [scales, biases] =
        [table.scales, table.offsets].map(|numbers| bf16_values(numbers.expect("numbers")));
    let packed = table.weight;
    // Rows are whole words, so the tensor is one stream of bits.
    let bit = |at: usize| u32::from(packed[at / 8] >> (at % 8) & 1);
    let bits = bits as usize;
    (0..scales.len() * group)
        .map(|i| {
            let q: u32 = (0..bits).map(|b| bit(i * bits + b) << b).sum();
            f64::from(q) * scales[i / group] + biases[i / group]
        })
        .collect()
}

#[test]
fn weights_have_the_deviation_that_keeps_activations_small() {
    for quantization in [None, Some((2, 32)), Some((3, 64)), Some((4, 64)), Some((8, 128))] {
        let (_temporary, path) = written(&tiny(), quantization, SHARD_BYTES);
        let folder = ModelFolder::open(&path).expect("it opens");
        let (mut sum, mut squares) = (0.0, 0.0);
        for value in embedding(&folder, quantization) {
            sum += value;
            squares += value * value;
        }
        let count = 4096.0 * 128.0;
        let deviation = (squares / count).sqrt() * 128f64.sqrt();
        // Scales between 3/4 and 5/4 add about 1 %.
        assert!((deviation - 0.8).abs() < 0.02, "{quantization:?}: {deviation}");
        assert!((sum / count).abs() < 0.001, "{quantization:?}: mean {}", sum / count);
    }
}

#[test]
fn the_seed_decides_the_bytes() {
    let bytes = |seed| {
        let temporary = tempfile::tempdir().expect("a folder");
        write(&tiny(), Some(4), 64, temporary.path(), seed, &mut |_, _| {})
            .expect("written to an empty folder");
        fs::read(temporary.path().join("model.safetensors")).expect("weights")
    };
    let first = bytes(1);
    assert!(first == bytes(1), "the same seed");
    assert!(first != bytes(2), "another seed");
}

#[test]
fn pieces_of_any_length_give_the_same_bytes() {
    let layout = Layout::new(&tiny(), Some((4, 64)), 3, SHARD_BYTES).expect("a layout");
    for tensor in &layout.shards[0].tensors[..3] {
        let mut whole = vec![0; 1000];
        tensor.filler().fill(&mut whole);
        let mut parts = vec![0; 1000];
        let mut filler = tensor.filler();
        for part in parts.chunks_mut(296) {
            filler.fill(part);
        }
        assert_eq!(whole, parts, "{}", tensor.name);
    }
}

#[test]
fn a_folder_in_use_is_left_alone() {
    let temporary = tempfile::tempdir().expect("a folder");
    fs::write(temporary.path().join("precious"), "x").expect("written");
    let error = write(&tiny(), Some(4), 64, temporary.path(), 0, &mut |_, _| {}).expect_err("refused");
    assert!(error.to_string().contains("not empty"), "{error}");
    assert_eq!(fs::read_dir(temporary.path()).expect("a folder").count(), 1);
}

#[test]
fn a_disk_that_is_too_small_is_named_with_the_sizes() {
    let temporary = tempfile::tempdir().expect("a folder");
    let layout = Layout::new(&Shape::named("devstral-123b").expect("listed"), Some((4, 64)), 0, SHARD_BYTES);
    let folder = temporary.path().join("new/folder");
    let error = layout.expect("a layout").check_space(&folder, |_| Ok(20 << 30)).expect_err("refused");
    let text = error.to_string();
    for part in ["devstral-123b with 4 bits in groups of 64", "65.5 GiB", "20.0 GiB free", "another disk"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn impossible_formats_are_refused() {
    let refusal = |shape: &Shape, quantization| {
        Layout::new(shape, quantization, 0, SHARD_BYTES).err().expect("refused").to_string()
    };
    assert!(refusal(&tiny(), Some((7, 64))).contains("7 bits in groups of 64"));
    assert!(refusal(&tiny(), Some((4, 48))).contains("4 bits in groups of 48"));
    let narrow = Shape { channels: 96, ..tiny() };
    assert!(refusal(&narrow, Some((4, 64))).contains("96 columns"));
    let small = Shape { vocab: 256, ..tiny() };
    assert!(refusal(&small, None).contains("too few"));
}

#[test]
fn a_disk_that_fails_leaves_nothing_behind() {
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = temporary.path().join("model");
    let layout = Layout::new(&tiny(), Some((4, 64)), 0, SHARD_BYTES).expect("a layout");
    // A folder with the name of a later file makes writing fail.
    let trap = folder.join("tokenizer.json");
    let error = layout.write(&folder, &mut |_, _| {
        fs::create_dir_all(&trap).expect("created");
    });
    assert!(error.expect_err("it fails").to_string().contains("tokenizer.json"));
    let left: Vec<_> = fs::read_dir(&folder).expect("a folder").map(|f| f.expect("a file").path()).collect();
    assert_eq!(left, [trap]);
}

#[test]
fn an_outline_has_the_footprint_of_the_model_and_takes_no_space() {
    let bytes = |path: &Path| {
        let folder = ModelFolder::open(path).expect("it opens");
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[2.0, 1.0]).expect("a plan");
        shard_footprints(&folder, &plan, KvFormat::F16).expect("all tensors")
    };
    let (_temporary, path) = written(&tiny(), Some((4, 64)), SHARD_BYTES);
    let temporary = tempfile::tempdir().expect("a folder");
    let outlined = temporary.path().join("model");
    outline(&tiny(), Some(4), 64, &outlined).expect("written");
    assert_eq!(bytes(&outlined), bytes(&path));
    assert!(outline(&tiny(), Some(4), 64, &outlined).is_err(), "nothing is overwritten");
    // 671 billion weights of 4.5 bits.
    let large = temporary.path().join("large");
    outline(&Shape::named("deepseek-v3").expect("it is listed"), Some(4), 64, &large).expect("written");
    let weights: u64 = bytes(&large).iter().map(|rank| rank.weight_bytes).sum();
    assert!((370_000_000_000..400_000_000_000).contains(&weights), "{weights}");
}
