//! GGUF files with experts and latent attention: bad ones and the errors that they must give, and
//! random metadata, which must not panic or exhaust memory.

use proptest::prelude::*;
use thunder_testing::gguf::Gguf;

use crate::files::{Case, check, damage, read, read_damaged, tries};

/// The number of Q8_0, and the bytes of its blocks.
const Q8_0: u32 = 8;
const Q8_0_BYTES: u64 = 34;
const EXPERTS: u64 = 4;

/// A good DeepSeek of one layer: 2 heads of 32 plain and 16 rotated columns, a compressed vector of
/// 32, 4 experts of 64 channels.
fn good() -> Gguf {
    of_architecture("deepseek2")
}

/// The same metadata and tensors, whatever they are to an architecture.
fn of_architecture(architecture: &str) -> Gguf {
    let mut file = Gguf::default().text("general.architecture", architecture);
    for (key, number) in [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.q_lora_rank", 32),
        ("attention.kv_lora_rank", 32),
        ("attention.key_length", 48),
        ("attention.value_length", 32),
        ("attention.key_length_mla", 48),
        ("attention.value_length_mla", 32),
        ("rope.dimension_count", 16),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 64),
        ("expert_shared_count", 1),
        ("expert_gating_func", 2),
    ] {
        file = file.number(&format!("{architecture}.{key}"), number);
    }
    for (key, number) in [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 1e4)] {
        file = file.float(&format!("{architecture}.{key}"), number);
    }
    for (name, dimensions) in [
        ("token_embd", vec![32, 64]),
        ("output", vec![32, 64]),
        ("blk.0.attn_q_a", vec![32, 32]),
        ("blk.0.attn_q_b", vec![32, 96]),
        ("blk.0.attn_kv_a_mqa", vec![32, 48]),
        ("blk.0.attn_k_b", vec![32, 32, 2]),
        ("blk.0.attn_v_b", vec![32, 32, 2]),
        ("blk.0.attn_output", vec![64, 32]),
        ("blk.0.ffn_gate_exps", vec![32, 64, EXPERTS]),
        ("blk.0.ffn_up_exps", vec![32, 64, EXPERTS]),
        ("blk.0.ffn_down_exps", vec![64, 32, EXPERTS]),
        ("blk.0.ffn_gate_shexp", vec![32, 64]),
        ("blk.0.ffn_up_shexp", vec![32, 64]),
        ("blk.0.ffn_down_shexp", vec![64, 32]),
    ] {
        let bytes = dimensions.iter().product::<u64>() / 32 * Q8_0_BYTES;
        file = file.tensor(&format!("{name}.weight"), &dimensions, Q8_0, vec![1; bytes as usize]);
    }
    for (name, count) in [
        ("output_norm.weight", 32),
        ("blk.0.attn_norm.weight", 32),
        ("blk.0.ffn_norm.weight", 32),
        ("blk.0.attn_q_a_norm.weight", 32),
        ("blk.0.attn_kv_a_norm.weight", 32),
        ("blk.0.exp_probs_b.bias", EXPERTS),
    ] {
        file = file.floats(name, &[count], &vec![1.0; count as usize]);
    }
    file.floats("blk.0.ffn_gate_inp.weight", &[32, EXPERTS], &[1.0; 32 * EXPERTS as usize])
}

#[test]
fn the_good_file_is_good() {
    read(&good()).expect("it is good");
}

const CASES: [Case; 16] = [
    (
        "more experts than there are",
        || good().number("deepseek2.expert_used_count", 5),
        &["num_experts_per_tok is 5"],
    ),
    ("no experts taken", || good().number("deepseek2.expert_used_count", 0), &["num_experts_per_tok is 0"]),
    ("nothing says how many", || good().without("deepseek2.expert_used_count"), &["num_experts_per_tok"]),
    (
        "2^32 - 1 experts",
        || good().number("deepseek2.expert_count", u32::MAX),
        &["number of experts is 4294967295"],
    ),
    ("another number of experts", || good().number("deepseek2.expert_count", 5), &["blk.0.ffn_gate", "5"]),
    // Then it is Youtu's, which has MLPs.
    ("no experts", || good().number("deepseek2.expert_count", 0), &["blk.0.ffn_down.weight"]),
    ("an unknown router", || good().number("deepseek2.expert_gating_func", 9), &["expert_gating_func is 9"]),
    (
        "a router that is a text",
        || good().text("deepseek2.expert_gating_func", "sigmoid"),
        &["expert_gating_func is a text"],
    ),
    (
        "groups that do not divide",
        || good().number("deepseek2.expert_group_count", 3).number("deepseek2.expert_group_used_count", 2),
        &["n_group is 3"],
    ),
    (
        "no compressed vector",
        || good().without("deepseek2.attention.kv_lora_rank"),
        &["it has no deepseek2.attention.kv_lora_rank"],
    ),
    (
        "heads that are all rotated",
        || good().number("deepseek2.rope.dimension_count", 48),
        &["rope.dimension_count is 48, but heads are 48 wide"],
    ),
    (
        "only layers that predict further tokens",
        || good().number("deepseek2.nextn_predict_layers", 1),
        &["block_count is 1", "1 predict further tokens"],
    ),
    (
        "a stack of another shape",
        || good().edit("blk.0.attn_k_b.weight", |dimensions, _, _| dimensions.swap(0, 2)),
        &["blk.0.attn_k_b.weight"],
    ),
    ("experts in F64", || good().edit("blk.0.ffn_up_exps.weight", |_, kind, _| *kind = 28), &["truncated"]),
    ("no router", || good().without_tensor("blk.0.ffn_gate_inp.weight"), &["blk.0.ffn_gate_inp.weight"]),
    (
        "no experts' weights",
        || good().without_tensor("blk.0.ffn_down_exps.weight"),
        &["blk.0.ffn_down_exps.weight"],
    ),
];

#[test]
fn every_bad_file_gives_its_reason() {
    check(&CASES);
}

/// Keys that are read, after the architecture's name.
const KEYS: &[&str] = &[
    "block_count",
    "nextn_predict_layers",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
    "leading_dense_block_count",
    "expert_group_count",
    "expert_group_used_count",
    "expert_gating_func",
    "expert_weights_scale",
    "expert_weights_norm",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "rope.scaling.yarn_log_multiplier",
];

proptest! {
    #![proptest_config(tries())]

    #[test]
    fn random_values_never_panic(
        damage in damage(KEYS),
        architecture in prop::sample::select(vec!["deepseek2", "gpt-oss", "glm4moe", "qwen3moe", "qwen2moe", "llama", "smollm3"]),
    ) {
        read_damaged(of_architecture(architecture), architecture, damage);
    }
}
