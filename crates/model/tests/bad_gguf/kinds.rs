//! GGUF files of Gemma 3 and 4, EXAONE 4, Qwen3-Next, Qwen3.5 and Kimi Linear: bad ones and the
//! errors that they must give, and random metadata, which must not panic or exhaust memory.

use proptest::prelude::*;
use thunder_testing::gguf::Gguf;

use crate::files::{Case, check, damage, read, read_damaged, tries};

/// The number of truth values as a list's items.
const BOOL: u32 = 7;

/// A model of two layers: its whole numbers, and the shapes of its tensors.
fn model(architecture: &str, numbers: &[(&str, u32)], tensors: &[(&str, &[u64])]) -> Gguf {
    let mut file = Gguf::default().text("general.architecture", architecture);
    let usual = [("block_count", 2), ("context_length", 64), ("embedding_length", 32)];
    let more = [("feed_forward_length", 32), ("attention.head_count", 2)];
    for (key, number) in usual.iter().chain(&more).chain(numbers) {
        file = file.number(&format!("{architecture}.{key}"), *number);
    }
    for (key, number) in [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 1e4)] {
        file = file.float(&format!("{architecture}.{key}"), number);
    }
    let usual: [(&str, &[u64]); 3] =
        [("token_embd.weight", &[32, 64]), ("output.weight", &[32, 64]), ("output_norm.weight", &[32])];
    for (name, dimensions) in usual.iter().chain(tensors) {
        // Decay rates are below zero.
        let value = if name.ends_with("ssm_a") { -1.0 } else { 1.0 };
        file = file.floats(name, dimensions, &vec![value; dimensions.iter().product::<u64>() as usize]);
    }
    file
}

/// Shapes of a gated MLP of a layer.
fn with_mlps(file: Gguf, layers: &[usize]) -> Gguf {
    let names = layers.iter().flat_map(|layer| ["gate", "up", "down"].map(|name| (layer, name)));
    names.fold(file, |file, (layer, name)| {
        file.floats(&format!("blk.{layer}.ffn_{name}.weight"), &[32, 32], &[1.0; 1024])
    })
}

/// The gated delta rule in layer 0 with 2 key heads and 4 value heads of 8, attention in layer 1.
fn delta(architecture: &str) -> Gguf {
    let numbers = [
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 4),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 8),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 32),
    ];
    let tensors: [(&str, &[u64]); 20] = [
        ("blk.0.attn_norm.weight", &[32]),
        ("blk.0.post_attention_norm.weight", &[32]),
        ("blk.0.ssm_a", &[4]),
        ("blk.0.ssm_conv1d.weight", &[4, 64]),
        ("blk.0.ssm_dt.bias", &[4]),
        ("blk.0.ssm_alpha.weight", &[32, 4]),
        ("blk.0.ssm_beta.weight", &[32, 4]),
        ("blk.0.attn_qkv.weight", &[32, 64]),
        ("blk.0.attn_gate.weight", &[32, 32]),
        ("blk.0.ssm_norm.weight", &[8]),
        ("blk.0.ssm_out.weight", &[32, 32]),
        ("blk.0.ssm_ba.weight", &[32, 8]),
        ("blk.1.attn_norm.weight", &[32]),
        ("blk.1.post_attention_norm.weight", &[32]),
        ("blk.1.attn_q.weight", &[32, 64]),
        ("blk.1.attn_k.weight", &[32, 16]),
        ("blk.1.attn_v.weight", &[32, 16]),
        ("blk.1.attn_output.weight", &[32, 32]),
        ("blk.1.attn_q_norm.weight", &[16]),
        ("blk.1.attn_k_norm.weight", &[16]),
    ];
    with_mlps(model(architecture, &numbers, &tensors), &[0, 1]).list(
        &format!("{architecture}.attention.recurrent_layers"),
        BOOL,
        2,
        &[1, 0],
    )
}

fn qwen35() -> Gguf {
    delta("qwen35").without_tensor("blk.0.ssm_ba.weight")
}

/// Both layers have the same experts.
fn with_experts(file: Gguf, architecture: &str, layers: &[usize]) -> Gguf {
    let numbers = [("expert_count", 4), ("expert_used_count", 2), ("expert_feed_forward_length", 32)];
    let file = numbers
        .iter()
        .fold(file, |file, (key, number)| file.number(&format!("{architecture}.{key}"), *number));
    layers.iter().fold(file, |mut file, layer| {
        for name in ["gate", "up", "down"] {
            file = file.floats(&format!("blk.{layer}.ffn_{name}_exps.weight"), &[32, 32, 4], &[1.0; 4096]);
        }
        file.floats(&format!("blk.{layer}.ffn_gate_inp.weight"), &[32, 4], &[1.0; 128])
    })
}

fn qwen3next() -> Gguf {
    let file =
        delta("qwen3next").without_tensor("blk.0.ssm_alpha.weight").without_tensor("blk.0.ssm_beta.weight");
    with_experts(file, "qwen3next", &[0, 1])
}

fn qwen35moe() -> Gguf {
    with_experts(delta("qwen35moe").without_tensor("blk.0.ssm_ba.weight"), "qwen35moe", &[0, 1])
}

/// A window in layer 0 with heads of 16, none in layer 1 with heads of 32 and values that are keys.
fn gemma4() -> Gguf {
    let numbers = [
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("attention.key_length_swa", 16),
        ("attention.value_length_swa", 16),
        ("rope.dimension_count", 32),
        ("rope.dimension_count_swa", 16),
        ("attention.sliding_window", 8),
        ("attention.shared_kv_layers", 0),
        ("embedding_length_per_layer_input", 0),
    ];
    let tensors: [(&str, &[u64]); 22] = [
        ("rope_freqs.weight", &[16]),
        ("blk.0.attn_norm.weight", &[32]),
        ("blk.0.post_attention_norm.weight", &[32]),
        ("blk.0.ffn_norm.weight", &[32]),
        ("blk.0.post_ffw_norm.weight", &[32]),
        ("blk.0.layer_output_scale.weight", &[1]),
        ("blk.0.attn_q.weight", &[32, 32]),
        ("blk.0.attn_k.weight", &[32, 16]),
        ("blk.0.attn_v.weight", &[32, 16]),
        ("blk.0.attn_output.weight", &[32, 32]),
        ("blk.0.attn_q_norm.weight", &[16]),
        ("blk.0.attn_k_norm.weight", &[16]),
        ("blk.1.attn_norm.weight", &[32]),
        ("blk.1.post_attention_norm.weight", &[32]),
        ("blk.1.ffn_norm.weight", &[32]),
        ("blk.1.post_ffw_norm.weight", &[32]),
        ("blk.1.layer_output_scale.weight", &[1]),
        ("blk.1.attn_q.weight", &[32, 64]),
        ("blk.1.attn_k.weight", &[32, 32]),
        ("blk.1.attn_output.weight", &[64, 32]),
        ("blk.1.attn_q_norm.weight", &[32]),
        ("blk.1.attn_k_norm.weight", &[32]),
    ];
    with_mlps(model("gemma4", &numbers, &tensors), &[0, 1])
        .list("gemma4.attention.sliding_window_pattern", BOOL, 2, &[1, 0])
        .numbers("gemma4.attention.head_count_kv", &[1, 1])
}

/// Heads of 16 everywhere, and norms around or after the parts.
fn windows(architecture: &str, around: bool) -> Gguf {
    let numbers = [
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("attention.sliding_window", 8),
    ];
    let mut file = with_mlps(model(architecture, &numbers, &[]), &[0, 1]);
    for layer in 0..2 {
        let norms =
            [("post_attention_norm", 32), ("post_ffw_norm", 32), ("attn_q_norm", 16), ("attn_k_norm", 16)];
        let before = [("attn_norm", 32), ("ffn_norm", 32)];
        for (name, len) in norms.into_iter().chain(before.into_iter().filter(|_| around)) {
            file = file.floats(&format!("blk.{layer}.{name}.weight"), &[len], &vec![1.0; len as usize]);
        }
        for (name, rows) in [("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)] {
            file = file.floats(
                &format!("blk.{layer}.{name}.weight"),
                &[32, rows],
                &vec![1.0; 32 * rows as usize],
            );
        }
    }
    file
}

fn gemma3() -> Gguf {
    windows("gemma3", true)
}

fn exaone4() -> Gguf {
    windows("exaone4", false)
}

/// The delta rule of channels in layer 0, latent attention and experts in layer 1.
fn kimi() -> Gguf {
    let numbers = [
        ("kda.head_dim", 16),
        ("ssm.conv_kernel", 4),
        ("attention.kv_lora_rank", 32),
        ("attention.key_length_mla", 32),
        ("attention.value_length_mla", 16),
        ("rope.dimension_count", 16),
        ("leading_dense_block_count", 1),
        ("expert_gating_func", 2),
    ];
    let tensors: [(&str, &[u64]); 26] = [
        ("blk.0.attn_norm.weight", &[32]),
        ("blk.0.ffn_norm.weight", &[32]),
        ("blk.0.attn_q.weight", &[32, 32]),
        ("blk.0.attn_k.weight", &[32, 32]),
        ("blk.0.attn_v.weight", &[32, 32]),
        ("blk.0.attn_output.weight", &[32, 32]),
        ("blk.0.ssm_conv1d_q.weight", &[4, 1, 32, 1]),
        ("blk.0.ssm_conv1d_k.weight", &[4, 1, 32, 1]),
        ("blk.0.ssm_conv1d_v.weight", &[4, 1, 32, 1]),
        ("blk.0.ssm_f_a.weight", &[32, 16]),
        ("blk.0.ssm_f_b.weight", &[16, 32]),
        ("blk.0.ssm_g_a.weight", &[32, 16]),
        ("blk.0.ssm_g_b.weight", &[16, 32]),
        ("blk.0.ssm_beta.weight", &[32, 2]),
        ("blk.0.ssm_a", &[1, 2, 1, 1]),
        ("blk.0.ssm_dt.bias", &[32]),
        ("blk.0.ssm_norm.weight", &[16]),
        ("blk.1.attn_norm.weight", &[32]),
        ("blk.1.ffn_norm.weight", &[32]),
        ("blk.1.attn_q.weight", &[32, 64]),
        ("blk.1.attn_kv_a_mqa.weight", &[32, 48]),
        ("blk.1.attn_kv_a_norm.weight", &[32]),
        ("blk.1.attn_k_b.weight", &[16, 32, 2]),
        ("blk.1.attn_v_b.weight", &[32, 16, 2]),
        ("blk.1.attn_output.weight", &[32, 32]),
        ("blk.1.exp_probs_b.bias", &[4]),
    ];
    let file = with_mlps(model("kimi-linear", &numbers, &tensors), &[0]);
    with_experts(file, "kimi-linear", &[1]).numbers("kimi-linear.attention.head_count_kv", &[0, 1])
}

/// An architecture, and what makes a good file of it.
type Good = (&'static str, fn() -> Gguf);

const GOOD: [Good; 7] = [
    ("gemma3", gemma3),
    ("gemma4", gemma4),
    ("exaone4", exaone4),
    ("qwen3next", qwen3next),
    ("qwen35", qwen35),
    ("qwen35moe", qwen35moe),
    ("kimi-linear", kimi),
];

#[test]
fn the_good_files_are_good() {
    for (name, file) in GOOD {
        if let Err(error) = read(&file()) {
            panic!("{name}: {error}");
        }
    }
}

const CASES: [Case; 39] = [
    ("no head count", || gemma3().without("gemma3.attention.head_count"), &["gemma3.attention.head_count"]),
    (
        "a window that is a text",
        || gemma3().text("gemma3.attention.sliding_window", "8"),
        &["sliding_window is a text"],
    ),
    (
        "a pattern of one layer",
        || gemma3().list("gemma3.attention.sliding_window_pattern", BOOL, 1, &[1]),
        &["sliding_window_pattern has 1 items for 2 layers"],
    ),
    ("a base of NaN", || gemma3().float("gemma3.rope.freq_base_swa", f32::NAN), &["freq_base_swa is NaN"]),
    ("no norm after attention", || gemma3().without_tensor("blk.1.post_attention_norm.weight"), &["blk.1."]),
    (
        "wider values",
        || gemma3().number("gemma3.attention.value_length", 32),
        &["gemma3.attention.value_length is 32"],
    ),
    (
        "no norm after an MLP",
        || exaone4().without_tensor("blk.0.post_ffw_norm.weight"),
        &["blk.0.post_ffw_norm.weight"],
    ),
    (
        "a short norm",
        || exaone4().edit("blk.1.attn_q_norm.weight", |dimensions, _, _| dimensions[0] = 8),
        &["blk.1.attn_q_norm.weight"],
    ),
    (
        "no embedding width",
        || exaone4().without("exaone4.embedding_length"),
        &["it has no exaone4.embedding_length"],
    ),
    (
        "no width in windows",
        || gemma4().without("gemma4.attention.key_length_swa"),
        &["gemma4.attention.key_length_swa"],
    ),
    (
        "no width",
        || gemma4().without("gemma4.attention.key_length"),
        &["it has no gemma4.attention.key_length"],
    ),
    (
        "narrow values in windows",
        || gemma4().number("gemma4.attention.value_length_swa", 8),
        &["gemma4.attention.value_length_swa is 8 and heads are 16 wide"],
    ),
    (
        "partial rotation",
        || gemma4().number("gemma4.rope.dimension_count", 8),
        &["gemma4.rope.dimension_count is 8"],
    ),
    (
        "layers that share keys",
        || gemma4().number("gemma4.attention.shared_kv_layers", 1),
        &["num_kv_shared_layers is 1"],
    ),
    (
        "inputs of layers",
        || gemma4().number("gemma4.embedding_length_per_layer_input", 256),
        &["\"per_layer_token_embd.weight\" is not in the model's files"],
    ),
    (
        "channels of each layer",
        || gemma4().numbers("gemma4.feed_forward_length", &[64, 96]),
        &["gemma4.feed_forward_length differs from layer to layer"],
    ),
    ("experts", || gemma4().number("gemma4.expert_count", 128), &["it has no num_experts_per_tok"]),
    (
        "no window",
        || gemma4().without("gemma4.attention.sliding_window"),
        &["it has no gemma4.attention.sliding_window"],
    ),
    (
        "KV heads of one layer",
        || gemma4().numbers("gemma4.attention.head_count_kv", &[1]),
        &["has 1 items for 2 layers"],
    ),
    (
        "KV heads below 0",
        || gemma4().numbers("gemma4.attention.head_count_kv", &[-1, 1]),
        &["head_count_kv has -1"],
    ),
    (
        "no KV heads at all",
        || gemma4().without("gemma4.attention.head_count_kv"),
        &["it has no gemma4.attention.head_count_kv"],
    ),
    (
        "KV heads that do not divide",
        || gemma4().numbers("gemma4.attention.head_count_kv", &[1, 3]),
        &["is 3"],
    ),
    (
        "divisors of another width",
        || gemma4().edit("rope_freqs.weight", |dimensions, _, _| dimensions[0] = 8),
        &["rope_freqs.weight"],
    ),
    (
        "a scale for each channel",
        || gemma4().floats("blk.0.layer_output_scale.weight", &[32], &[1.0; 32]),
        &["blk.0.layer_output_scale.weight"],
    ),
    ("no convolution", || qwen35().without("qwen35.ssm.conv_kernel"), &["it has no qwen35.ssm.conv_kernel"]),
    (
        "a convolution that is a text",
        || qwen35().text("qwen35.ssm.conv_kernel", "4"),
        &["qwen35.ssm.conv_kernel is a text"],
    ),
    (
        "no value heads",
        || qwen35().number("qwen35.ssm.time_step_rank", 0),
        &["qwen35.ssm.inner_size is 32", "0 value heads"],
    ),
    (
        "value heads that do not divide",
        || qwen35().number("qwen35.ssm.group_count", 3),
        &["linear_num_key_heads, 3"],
    ),
    (
        "2^32 - 1 key heads",
        || qwen35().number("qwen35.ssm.group_count", u32::MAX),
        &["linear_num_key_heads is 4294967295"],
    ),
    (
        "kinds of one layer",
        || qwen35().list("qwen35.attention.recurrent_layers", BOOL, 1, &[1]),
        &["qwen35.attention.recurrent_layers has 1 items for 2 layers"],
    ),
    (
        "attention in no layer",
        || qwen35().without("qwen35.attention.recurrent_layers").number("qwen35.full_attention_interval", 0),
        &["full_attention_interval is 0"],
    ),
    ("rates above 0", || qwen35().floats("blk.0.ssm_a", &[4], &[1.0; 4]), &["blk.0.ssm_a", "below 0"]),
    (
        "a short projection",
        || qwen35().floats("blk.0.attn_qkv.weight", &[32, 32], &[1.0; 1024]),
        &["blk.0.attn_qkv.weight"],
    ),
    ("no decays", || qwen35moe().without_tensor("blk.0.ssm_alpha.weight"), &["blk.0.ssm_alpha.weight"]),
    ("no decays in one", || qwen3next().without_tensor("blk.0.ssm_ba.weight"), &["blk.0.ssm_beta.weight"]),
    (
        "no width of heads",
        || kimi().without("kimi-linear.kda.head_dim"),
        &["it has no kimi-linear.kda.head_dim"],
    ),
    (
        "one number of KV heads",
        || kimi().number("kimi-linear.attention.head_count_kv", 1),
        &["kimi-linear.attention.head_count_kv is 1, not a list of numbers"],
    ),
    (
        "kinds of one layer of Kimi",
        || kimi().numbers("kimi-linear.attention.head_count_kv", &[0]),
        &["kimi-linear.attention.head_count_kv has 1 items for 2 layers"],
    ),
    (
        "no convolution of keys",
        || kimi().without_tensor("blk.0.ssm_conv1d_k.weight"),
        &["blk.0.ssm_conv1d_k.weight"],
    ),
];

#[test]
fn every_bad_file_gives_its_reason() {
    check(&CASES);
}

/// Keys that these architectures have of their own, after the architecture's name.
const KEYS: &[&str] = &[
    "block_count",
    "nextn_predict_layers",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.recurrent_layers",
    "full_attention_interval",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "kda.head_dim",
];

proptest! {
    #![proptest_config(tries())]

    #[test]
    fn random_values_never_panic(damage in damage(KEYS), of in prop::sample::select(GOOD.to_vec())) {
        let (architecture, good) = of;
        read_damaged(good(), architecture, damage);
    }
}
