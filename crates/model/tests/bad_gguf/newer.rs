//! GGUF files of Granite 4, MiMo V2, GLM-5.3 and DeepSeek V4 whose metadata is bad: the errors that
//! they must give, and random metadata, which must not panic or exhaust memory.

use proptest::prelude::*;
use thunder_testing::gguf::Gguf;

use crate::files::{Case, check, damage, read, read_damaged, tries};

/// Metadata of two layers, and no tensor that they need.
fn bare(architecture: &str, numbers: &[(&str, u32)]) -> Gguf {
    let mut file = Gguf::default().text("general.architecture", architecture);
    let usual = [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 32),
        ("expert_shared_count", 1),
    ];
    for (key, number) in usual.iter().chain(numbers) {
        file = file.number(&format!("{architecture}.{key}"), *number);
    }
    for (key, number) in [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 1e4)] {
        file = file.float(&format!("{architecture}.{key}"), number);
    }
    let (table, norm) = (["token_embd.weight", "output.weight"], "output_norm.weight");
    let file = table.into_iter().fold(file, |file, name| file.floats(name, &[32, 64], &[1.0; 2048]));
    file.floats(norm, &[32], &[1.0; 32])
}

/// Tensors whose presence says what a layer is.
fn granite() -> Gguf {
    let numbers = [
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 8),
        ("ssm.group_count", 1),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 64),
    ];
    bare("granitehybrid", &numbers)
        .numbers("granitehybrid.attention.head_count_kv", &[0, 1])
        .floats("blk.0.ssm_in.weight", &[32, 148], &[1.0; 32 * 148])
        .floats("blk.1.attn_q.weight", &[32, 32], &[1.0; 1024])
}

fn mimo() -> Gguf {
    let numbers = [
        ("attention.key_length", 32),
        ("attention.value_length", 16),
        ("attention.sliding_window", 8),
        ("expert_gating_func", 2),
    ];
    bare("mimo2", &numbers)
        .numbers("mimo2.attention.head_count_kv", &[1, 2])
        .numbers("mimo2.attention.sliding_window_pattern", &[0, 1])
}

fn glm() -> Gguf {
    let numbers = [
        ("attention.q_lora_rank", 32),
        ("attention.kv_lora_rank", 32),
        ("attention.key_length_mla", 32),
        ("attention.value_length_mla", 32),
        ("rope.dimension_count", 0),
        ("leading_dense_block_count", 1),
        ("kda.head_dim", 16),
        ("ssm.conv_kernel", 4),
        ("attention.indexer.head_count", 2),
        ("attention.indexer.key_length", 32),
        ("attention.indexer.top_k", 16),
        ("attention.indexer.kpool", 4),
        ("hyper_connection.count", 4),
        ("hyper_connection.sinkhorn_iterations", 20),
    ];
    bare("glm5-next", &numbers).numbers("glm5-next.attention.head_count_kv", &[0, 1])
}

fn deepseek() -> Gguf {
    let numbers = [
        ("attention.key_length", 32),
        ("attention.q_lora_rank", 32),
        ("rope.dimension_count", 16),
        ("attention.sliding_window", 8),
        ("attention.output_group_count", 2),
        ("attention.output_lora_rank", 32),
        ("attention.indexer.head_count", 2),
        ("attention.indexer.key_length", 32),
        ("attention.indexer.top_k", 8),
        ("expert_gating_func", 4),
        ("hash_layer_count", 1),
        ("hyper_connection.count", 4),
        ("hyper_connection.sinkhorn_iterations", 20),
    ];
    bare("deepseek4", &numbers).numbers("deepseek4.attention.compress_ratios", &[0, 4])
}

/// Two f32.
fn floats(a: f32, b: f32) -> Vec<u8> {
    [a.to_le_bytes(), b.to_le_bytes()].concat()
}

const F32: u32 = 6;

/// An architecture, and its metadata.
type Whole = (&'static str, fn() -> Gguf);

const WHOLE: [Whole; 4] =
    [("granitehybrid", granite), ("mimo2", mimo), ("glm5-next", glm), ("deepseek4", deepseek)];

/// The cases below change metadata that is good: all that is missing are tensors.
#[test]
fn whole_metadata_is_read() {
    for (name, file) in WHOLE {
        let error = read(&file()).expect_err("there are no tensors").to_string();
        assert!(error.contains("is not in the model's files"), "{name}: {error}");
    }
}

const CASES: [Case; 14] = [
    (
        "no taps",
        || granite().without("granitehybrid.ssm.conv_kernel"),
        &["it has no granitehybrid.ssm.conv_kernel"],
    ),
    (
        "a layer without a mixer",
        || granite().without_tensor("blk.1.attn_q.weight"),
        &["layer 1 has no ssm_in and no attn_q"],
    ),
    (
        "two numbers of KV heads",
        || granite().numbers("granitehybrid.attention.head_count_kv", &[1, 2]),
        &["granitehybrid.attention.head_count_kv has 1 and 2"],
    ),
    (
        "heads that do not divide",
        || granite().number("granitehybrid.ssm.inner_size", 66),
        &["granitehybrid.ssm.inner_size is 66, no multiple of the 4 heads"],
    ),
    (
        "no windows",
        || mimo().without("mimo2.attention.sliding_window"),
        &["it has no mimo2.attention.sliding_window"],
    ),
    (
        "two numbers of KV heads of one kind",
        || mimo().numbers("mimo2.attention.sliding_window_pattern", &[1, 1]),
        &["mimo2.attention.head_count_kv has 1 and 2 for layers of one kind"],
    ),
    (
        "an unknown router",
        || mimo().number("mimo2.expert_gating_func", 9),
        &["mimo2.expert_gating_func is 9", "3 and 4 are known"],
    ),
    (
        "no keys of several tokens",
        || glm().without("glm5-next.attention.indexer.kpool"),
        &["it has no glm5-next.attention.indexer.kpool"],
    ),
    (
        "no streams",
        || glm().without("glm5-next.hyper_connection.count"),
        &["it has no glm5-next.hyper_connection.count"],
    ),
    (
        "two limits",
        || glm().list("glm5-next.swiglu_clamp_exp", F32, 2, &floats(7.0, 8.0)),
        &["glm5-next.swiglu_clamp_exp has 7 and", "one limit is supported"],
    ),
    (
        "another limit of the shared expert",
        || {
            let file = glm().list("glm5-next.swiglu_clamp_exp", F32, 2, &floats(7.0, 7.0));
            file.list("glm5-next.swiglu_clamp_shexp", F32, 2, &floats(9.0, 9.0))
        },
        &["glm5-next.swiglu_clamp_shexp is 9 and glm5-next.swiglu_clamp_exp 7"],
    ),
    (
        "no ratios",
        || deepseek().without("deepseek4.attention.compress_ratios"),
        &["it has no deepseek4.attention.compress_ratios"],
    ),
    (
        "a ratio below zero",
        || deepseek().numbers("deepseek4.attention.compress_ratios", &[0, -4]),
        &["deepseek4.attention.compress_ratios has -4"],
    ),
    (
        "an unknown ratio",
        || deepseek().numbers("deepseek4.attention.compress_ratios", &[0, 8]),
        &["compress_ratios has 8: 0, 4 and 128 are known"],
    ),
];

#[test]
fn every_bad_file_gives_its_reason() {
    check(&CASES);
}

/// Keys that these architectures have of their own, after the architecture's name.
const KEYS: &[&str] = &[
    "block_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.value_scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.compress_ratios",
    "attention.output_group_count",
    "attention.indexer.top_k",
    "attention.indexer.kpool",
    "attention.indexer.types",
    "hash_layer_count",
    "hyper_connection.count",
    "hyper_connection.epsilon",
    "swiglu_clamp_exp",
    "ssm.inner_size",
    "kda.gate_lower_bound",
];

proptest! {
    #![proptest_config(tries())]

    #[test]
    fn random_values_never_panic(damage in damage(KEYS), of in prop::sample::select(WHOLE.to_vec())) {
        let (architecture, whole) = of;
        read_damaged(whole(), architecture, damage);
    }
}
