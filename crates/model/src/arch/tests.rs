//! Configs of published models, and the errors for wrong ones.

use std::path::Path;

use serde_json::{Value, json};

use super::spec;
use crate::spec::{FeedForwardSpec, MixerSpec, ModelSpec, Norms};

/// The config of a golden case with other values of some fields; null removes a field.
fn changed(case: &str, fields: &[(&str, Value)]) -> Value {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases");
    let text = std::fs::read_to_string(cases.join(case).join("config.json")).expect("the case is there");
    let mut config: Value = serde_json::from_str(&text).expect("a config is JSON");
    for (field, value) in fields {
        match value {
            Value::Null => drop(config.as_object_mut().expect("an object").remove(*field)),
            value => config[*field] = value.clone(),
        }
    }
    config
}

fn read(config: &Value) -> Result<ModelSpec, String> {
    spec(config, Path::new("config.json")).map_err(|error| error.to_string())
}

#[test]
fn wrong_fields_of_newer_families_are_named() {
    let cases: &[(&str, &str, Value, &str)] = &[
        ("transformers-llama4", "num_experts_per_tok", json!(2), "num_experts_per_tok is 2: 1 is supported"),
        ("transformers-llama4", "attention_chunk_size", json!(0), "attention_chunk_size is 0"),
        ("transformers-llama4", "floor_scale", json!(0), "floor_scale is 0"),
        (
            "transformers-llama4",
            "attn_temperature_tuning",
            json!("yes"),
            "attn_temperature_tuning is \"yes\"",
        ),
        (
            "transformers-deepseek_v32",
            "index_head_dim",
            json!(40),
            "index_head_dim is 40: it must be a multiple",
        ),
        ("transformers-deepseek_v32", "index_topk", json!(0), "index_topk is 0"),
        (
            "deepseek_v41-4bit",
            "compress_ratios",
            json!([0, 4, 4, 1, 1, 1]),
            "compress_ratios has 4: 0, 1 and 2",
        ),
        (
            "deepseek_v41-4bit",
            "compress_ratios",
            json!([0, 2, 1, 1, 1, 1]),
            "layer 2 reads kv_source_layer_ids of layer 1",
        ),
        ("deepseek_v41-4bit", "compress_ratios", json!([0, 0, 2, 1, 1, 1]), "layer 1 compresses no tokens"),
        ("deepseek_v41-4bit", "compress_ratios", json!([0, 2]), "compress_ratios has 2 entries for 6 layers"),
        ("deepseek_v41-4bit", "kv_source_layer_ids", json!([3]), "layer 1 has no kv_source_layer_ids"),
        ("deepseek_v41-4bit", "kv_source_layer_ids", json!([1, 3, 6]), "kv_source_layer_ids names layer 6"),
        (
            "deepseek_v41-4bit",
            "candidate_source_layer_id",
            json!(6),
            "candidate_source_layer_id names layer 6",
        ),
        ("deepseek_v41-4bit", "attention_bias", json!(true), "attention_bias is true"),
        ("deepseek_v41-4bit", "index_source_layer_ids", json!([3, 4]), "layer 1 has no keys"),
        ("deepseek_v41-4bit", "candidate_topk_blocks", json!(8), "candidate_topk_blocks is 8"),
        ("deepseek_v41-4bit", "candidate_source_layer_id", json!(1), "candidate_source_layer_id is 1"),
        ("deepseek_v41-4bit", "head_dim", json!(48), "head_dim is 48: a multiple of 32"),
        ("deepseek_v41-4bit", "gate_temp", json!(0.5), "gate_temp is Some(0.5)"),
        ("deepseek_v41-engram", "engram_num_embeddings", json!([408]), "primes from 97 on give [408, 480]"),
        ("deepseek_v41-engram", "engram_n_heads", json!(0), "engram_n_heads is 0"),
        ("deepseek_v41-engram", "engram_layer_ids", json!([2, 0]), "engram_layer_ids is [2, 0]"),
        (
            "transformers-glm_moe_dsa",
            "indexer_types",
            json!(["shared", "full", "full"]),
            "the indexer of layer 0",
        ),
        ("transformers-kimi_linear", "layer_types", json!(["linear_attention"]), "layer_types[1] is None"),
        ("transformers-kimi_linear", "linear_head_dim", json!(0), "head_dim is 0"),
        (
            "transformers-gemma4_text",
            "hidden_size_per_layer_input",
            json!(1 << 20),
            "hidden_size_per_layer_input is 1048576",
        ),
        ("transformers-gemma4_text", "num_kv_shared_layers", json!(2), "num_kv_shared_layers is 2"),
        ("transformers-gemma4_text", "num_kv_shared_layers", json!(1), "layer 1 needs an earlier layer"),
        ("transformers-gemma4_text", "enable_moe_block", json!(true), "it has no n_routed_experts"),
        ("transformers-gemma4_experts", "top_k_experts", json!(7), "num_experts_per_tok is 7"),
        ("transformers-gemma4_experts", "moe_intermediate_size", json!(1u64 << 40), "channels"),
        ("kimi_linear-4bit", "attn_res_block_size", json!(0), "attn_res_block_size is 0"),
        ("kimi_linear-4bit", "routed_expert_hidden_size", json!(0), "moe_latent_size is 0"),
        ("kimi_linear-4bit", "hidden_act", json!("relu"), "silu, gelu_pytorch_tanh and situ are"),
        (
            "kimi_linear-4bit",
            "linear_attn_config",
            json!({ "num_heads": 6, "head_dim": 64, "kda_layers": [1, 3], "full_attn_layers": [2], "gate_lower_bound": 0.5 }),
            "gate_lower_bound is 0.5",
        ),
        (
            "transformers-gemma4_text",
            "per_layer_config",
            json!({ "1": { "num_key_value_heads": 3 } }),
            "num_global_key_value_heads is 3",
        ),
        ("nemotron_h-4bit", "hybrid_override_pattern", json!("MX"), "the pattern of layers has \"X\""),
        ("nemotron_h-4bit", "hybrid_override_pattern", json!(""), "the pattern of layers has 0 of them"),
        ("granitemoehybrid-4bit", "layer_types", json!(["mamba", "mlp"]), "layer 1 is Mlp"),
        ("granitemoehybrid-4bit", "layer_types", json!(["mamba"]), "layer_types has 1 entries for 2 layers"),
        ("granitemoehybrid-4bit", "position_embedding_type", json!("alibi"), "is \"alibi\": rope, nope"),
        ("granitemoehybrid-4bit", "mamba_d_head", json!("wide"), "mamba_d_head is \"wide\""),
        ("granitemoehybrid-4bit", "mamba_n_heads", json!(0), "mamba_num_heads is 0"),
        ("granitemoehybrid-4bit", "mamba_proj_bias", json!(true), "mamba_proj_bias is true"),
        ("transformers-lfm2", "conv_bias", json!(true), "conv_bias is true"),
        ("transformers-lfm2", "conv_L_cache", json!(0), "conv_L_cache is 0"),
        ("transformers-lfm2", "layer_types", json!(["conv"]), "layer_types has 1 entries"),
        ("lfm2-4bit", "full_attn_idxs", json!(null), "neither layer_types nor full_attn_idxs"),
        ("transformers-lfm2_moe", "use_expert_bias", json!(false), "use_expert_bias is false"),
        ("transformers-lfm3", "use_sandwich_norm", json!(false), "use_sandwich_norm is false"),
        ("minicpm-4bit", "dim_model_base", json!(0.0), "logits_scaling comes to inf"),
        ("minicpm-4bit", "scale_depth", json!(-1.0), "residual_multiplier comes to -"),
        (
            "transformers-granite_swa",
            "layer_rope_theta",
            json!([1e4]),
            "layer_rope_theta has 1 entries for 4",
        ),
        ("transformers-granite_swa", "layer_rope_theta", json!([-1.0, 0, 0, 0]), "rope_theta is -1"),
        ("nemotron_h-4bit", "n_groups", json!(4), "mamba_num_heads is 6, no multiple of n_groups, 4"),
        ("nemotron_h-4bit", "ssm_state_size", json!(0), "ssm_state_size is 0"),
        (
            "nemotron_h-4bit",
            "mlp_hidden_act",
            json!("silu"),
            "mlp_hidden_act is \"silu\": relu2 is supported",
        ),
        ("nemotron_h-4bit", "time_step_limit", json!([1.0, 0.5]), "time_step_limit is 1 to 0.5"),
        ("nemotron_h-4bit", "moe_latent_size", json!(0), "moe_latent_size is 0"),
        ("transformers-gemma2", "attn_logit_softcapping", json!(-1.0), "attn_logit_softcapping is -1"),
        ("transformers-gemma2", "final_logit_softcapping", json!(0.0), "final_logit_softcapping is 0"),
    ];
    for (case, field, value, words) in cases {
        let error = read(&changed(case, &[(field, value.clone())])).expect_err(words);
        assert!(error.contains(words), "{case}, {field}: {words:?} is not in {error:?}");
    }
}

/// Published files of Kimi Linear count layers from 1.
#[test]
fn kimi_linear_is_read_as_published() {
    let mut linear = json!({ "num_heads": 5, "head_dim": 32, "kda_layers": [1, 3], "full_attn_layers": [2] });
    let config = |linear: &Value| {
        let fields = [("layer_types", Value::Null), ("linear_attn_config", linear.clone())];
        read(&changed("transformers-kimi_linear", &fields))
    };
    let model = config(&linear).expect("it is as published");
    let delta = |layer: usize| matches!(model.layers[layer].mixer, MixerSpec::ChannelDelta(_));
    assert_eq!([delta(0), delta(1), delta(2)], [true, false, true]);
    linear["kda_layers"] = json!([1]);
    let error = config(&linear).expect_err("layer 3 is in neither list");
    assert!(error.contains("layer 3 must be in one of kda_layers"), "{error}");
}

/// A delta rule's epsilon differs from that of the model's norms.
#[test]
fn unit_vectors_have_an_epsilon_of_their_own() {
    for case in ["transformers-qwen3_next", "transformers-kimi_linear"] {
        let model = read(&changed(case, &[("rms_norm_eps", json!(0.25))])).expect("it is a config");
        let found = model.layers.iter().filter_map(|layer| match &layer.mixer {
            MixerSpec::Delta(shape) => Some(shape.unit_eps),
            MixerSpec::ChannelDelta(shape) => Some(shape.unit_eps),
            _ => None,
        });
        assert_eq!((model.norm_eps, found.collect::<Vec<_>>()), (0.25, vec![1e-6; 2]), "{case}");
    }
}

#[test]
fn fields_that_configs_leave_out_have_their_classes_defaults() {
    let fields =
        ["attention_chunk_size", "floor_scale", "attn_scale", "no_rope_layers", "layer_types", "moe_layers"];
    let fields = fields.map(|field| (field, Value::Null));
    let model = read(&changed("transformers-llama4", &fields)).expect("all have defaults");
    let rotates = |layer: usize| match &model.layers[layer].mixer {
        MixerSpec::Attention(attention) => attention.rope.is_some(),
        _ => false,
    };
    assert_eq!([rotates(0), rotates(1), rotates(2), rotates(3)], [true, true, true, false]);
    let experts = |layer: usize| matches!(model.layers[layer].feed_forward, FeedForwardSpec::Experts(_));
    assert_eq!([experts(0), experts(1), experts(2), experts(3)], [false, true, false, true]);
    let model =
        read(&changed("transformers-cohere", &[("logit_scale", Value::Null)])).expect("it has a default");
    assert_eq!((model.logit_scale, model.layers[0].norms), (0.0625, Norms::Shared));
}

/// Up to a certain length, all blocks are selected; only up to there are the answers correct.
#[test]
fn minimax_m3_ends_where_its_selection_would_leave_tokens_out() {
    let case = "transformers-minimax_m3_vl_text";
    let model = read(&changed(case, &[])).expect("a model");
    assert_eq!(model.context, 9 * 8);
    let nowhere = json!(["full_attention", "full_attention"]);
    let model = read(&changed(case, &[("layer_types", nowhere)])).expect("a model");
    assert_eq!(model.context, 256);
    // As published files have it, around the language model's fields.
    let text = changed(
        case,
        &[
            ("layer_types", Value::Null),
            ("mlp_layer_types", Value::Null),
            ("rope_parameters", Value::Null),
            ("max_position_embeddings", json!(524_288)),
            ("moe_layer_freq", json!([0, 1])),
            (
                "sparse_attention_config",
                json!({ "sparse_block_size": 128, "sparse_topk_blocks": 16, "sparse_attention_freq": [0, 1] }),
            ),
        ],
    );
    let model = read(&json!({ "model_type": "minimax_m3_vl", "text_config": text })).expect("a model");
    assert_eq!(model.context, 2048);
    let experts = |layer: usize| matches!(model.layers[layer].feed_forward, FeedForwardSpec::Experts(_));
    assert_eq!([experts(0), experts(1)], [false, true]);
    // The second of 8 frequencies is the base's eighth root.
    let base = 1.0 / model.ropes[0].inverse_frequencies[1].powi(8);
    assert!((base / 5e6 - 1.0).abs() < 1e-3, "{base}");
}

#[test]
fn wrong_fields_of_kin_are_named() {
    for (case, field, value, told) in [
        ("transformers-minimax_m3_vl_text", "use_gemma_norm", json!(false), "use_gemma_norm is false"),
        ("transformers-minimax_m3_vl_text", "swiglu_alpha", json!(0), "swiglu_alpha is 0"),
        ("transformers-minimax_m3_vl_text", "mlp_layer_types", json!(["dense"]), "mlp_layer_types[1]"),
        ("hunyuan-4bit", "use_cla", json!(true), "use_cla"),
        ("hunyuan-4bit", "moe_topk", json!([2, 4]), "moe_topk is [2, 4]: the same number for all layers"),
        ("transformers-olmoe", "clip_qkv", json!(8.0), "clip_qkv"),
        ("transformers-granitemoeshared", "shared_intermediate_size", json!(1u64 << 40), "the shared expert"),
    ] {
        let error = read(&changed(case, &[(field, value)])).expect_err(field);
        assert!(error.contains(told), "{case}, {field}: {error}");
    }
}
