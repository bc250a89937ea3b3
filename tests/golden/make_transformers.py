#!/usr/bin/env python3
"""Makes the golden fixtures of families that transformers has and MLX-LM reads otherwise, or not at all: folders as transformers writes them, with random
weights in bf16, and the logits that transformers computes for them in f32.

    python3 tests/golden/make_transformers.py [--out DIR] [NAME...]

Needs PyTorch and transformers 5.17 (the later families: 5.23, DeepSeek V4 and GLM-5.3: 5.24). Every random number comes from a generator seeded with the case's name, so each
folder can be made alone. README.md says what is in the files.
"""

from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

import fixture

BASE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 163,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.0,
}
LATENT = {
    **BASE,
    "head_dim": None,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "n_shared_experts": 1,
    "n_routed_experts": 6,
}
DENSE = {**BASE, "moe_intermediate_size": None, "num_experts_per_tok": None}
WINDOW_FIRST = ["sliding_attention", "full_attention"]
GEMMA4 = {
    **DENSE, "model_type": "gemma4_text", "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": WINDOW_FIRST, "sliding_window": 16,
    "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "final_logit_softcapping": 15.0, "rope_theta": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
    },
}
# Two of three layers have the delta rule, and twice as many values as keys.
DELTA = {
    **BASE,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
# README.md says what transformers does with time_step_min.
NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 163, "max_position_embeddings": 256, "mamba_num_heads": 6, "mamba_head_dim": 24, "n_groups": 3,
    "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 16, "time_step_min": 1e-30, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
}
GRANITE4 = {
    **BASE, "model_type": "granitemoehybrid", "hidden_size": 48, "intermediate_size": 32, "moe_intermediate_size": None, "num_local_experts": 3, "head_dim": None,
    "num_attention_heads": 3, "num_key_value_heads": 1, "shared_intermediate_size": 48, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 1.5, "mamba_n_heads": 3, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_chunk_size": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
QWEN3_NEXT = {
    **DELTA, "model_type": "qwen3_next", "num_experts": 6, "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}
KIMI_LINEAR = {
    **LATENT, "model_type": "kimi_linear", "head_dim": None, "q_lora_rank": None, "num_hidden_layers": 3, "n_routed_experts": None,
    "num_local_experts": 6, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "routed_scaling_factor": 2.4,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_num_heads": 5, "linear_head_dim": 32, "linear_conv_kernel_dim": 4,
    "rope_theta": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
# A small encoder of images.
SEES = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": 64, "patch_size": 2, "image_size": 4}
CASES = {
    # One layer has a plain MLP.
    "qwen3_moe": {**BASE, "model_type": "qwen3_moe", "num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {**BASE, "model_type": "qwen2_moe", "num_experts": 5, "shared_expert_intermediate_size": 160},
    "mixtral": {**BASE, "model_type": "mixtral", "num_local_experts": 4, "moe_intermediate_size": None},
    "glm4_moe": {
        **BASE, "model_type": "glm4_moe", "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v2": {
        **LATENT, "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 1,
        "n_shared_experts": 2, "routed_scaling_factor": 1.0,
    },
    "deepseek_v2_groups": {
        **LATENT, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
        "routed_scaling_factor": 4.0, "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        **LATENT, "model_type": "deepseek_v3", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "rope_theta": None, "rope_parameters": YARN, "rope_scaling": None,
    },
    "seed_oss": {**BASE, "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False},
    # The second layer does not rotate.
    "smollm3": {**BASE, "model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": False,
                "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "ernie4_5": {**BASE, "model_type": "ernie4_5", "use_bias": True},
    "glm4_moe_lite": {
        **LATENT, "model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
        "mlp_layer_types": ["dense", "sparse"],
    },
    # Two projections for one key head after the other; gated attention; norms less one.
    "qwen3_next": QWEN3_NEXT,
    # Four projections; the experts' gate and up in one stack.
    "qwen3_5": {**DELTA, "model_type": "qwen3_5_text", "moe_intermediate_size": None},
    "qwen3_5_moe": {
        **DELTA, "model_type": "qwen3_5_moe_text", "num_experts": 6, "shared_expert_intermediate_size": 64,
    },
    # Norms of all queries and of all keys; partial rotation.
    "minimax_m2": {
        **BASE, "model_type": "minimax_m2", "bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 6, "intermediate_size": 96, "moe_intermediate_size": None,
        "rotary_dim": 16, "scoring_func": "sigmoid",
    },
    # The router's correction; the last layer has a plain MLP.
    "ernie4_5_moe": {
        **BASE, "model_type": "ernie4_5_moe", "num_experts_per_tok": None, "moe_num_experts": 6, "moe_k": 2,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 0, "moe_layer_interval": 1,
        "use_bias": False,
    },
    # The first layer has a window and a rotation of its own; GELU; norms around, less one.
    "gemma3_text": {
        **DENSE, "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": WINDOW_FIRST, "sliding_window": 16,
        "query_pre_attn_scalar": 24, "rope_theta": None, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    },
    # Queries, keys and values in one tensor, gates and ups in another; divisors of the frequencies.
    "phi3": {
        **DENSE, "model_type": "phi3", "head_dim": None, "hidden_size": 192, "pad_token_id": 0, "eos_token_id": 2,
        "original_max_position_embeddings": 16, "rope_theta": None,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + i / 8 for i in range(12)], "long_factor": [1.5 + i / 2 for i in range(12)],
            "original_max_position_embeddings": 16,
        },
        "partial_rotary_factor": 0.75,
    },
    # Norms after; norms of all queries and of all keys.
    "olmo2": {**DENSE, "model_type": "olmo2", "eos_token_id": 2, "head_dim": None, "hidden_size": 96},
    "olmo3": {
        **DENSE, "model_type": "olmo3", "eos_token_id": 2, "head_dim": None, "hidden_size": 96, "layer_types": WINDOW_FIRST,
        "sliding_window": 16, "rope_theta": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
                "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0,
            },
        },
    },
    "granite": {
        **DENSE, "model_type": "granite", "head_dim": None, "hidden_size": 96, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5,
    },
    # Norms around; neighbouring columns are rotated together.
    "glm4": {**DENSE, "model_type": "glm4", "pad_token_id": 0, "eos_token_id": 2, "attention_bias": True, "partial_rotary_factor": 0.5},
    # Norms after; only layers with a window rotate.
    "exaone4": {**DENSE, "model_type": "exaone4", "layer_types": WINDOW_FIRST, "sliding_window": 16},
    # Caps of scores and of logits.
    "gemma2": {
        **DENSE, "model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": WINDOW_FIRST,
        "sliding_window": 16, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "attn_logit_softcapping": 1.5, "final_logit_softcapping": 15.0,
    },
    # Layers without a window have wider heads, one KV head, and keys for values. Values are normed.
    # A factor for each layer.
    "gemma4_text": GEMMA4,
    # As Gemma 4 E2B: an input for each layer. The last layers read keys and values of earlier
    # ones, and have wider MLPs.
    "gemma4_inputs": {
        **GEMMA4, "num_hidden_layers": 5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": False, "num_global_key_value_heads": None, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": BASE["vocab_size"],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    },
    # As Gemma 4 26B-A4B: experts next to each layer's MLP, all with norms of their own.
    "gemma4_experts": {
        **GEMMA4, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 96,
    },
    # Values narrower than keys, and scaled; layers with a window have twice as many KV heads,
    # sinks, and another base.
    "mimo_v2_flash": {
        **BASE, "model_type": "mimo_v2_flash", "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "sliding_window": 17, "head_dim": 48, "v_head_dim": 32, "n_routed_experts": 6,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "attention_value_scale": 0.707, "rope_theta": None,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.334}
                            for kind, base in (("full_attention", 100000.0), ("sliding_attention", 1000.0))},
    },
    # Norms subtract the mean, heads' own with own weights; mixer and feed-forward read one norm.
    "cohere": {**DENSE, "model_type": "cohere", "rms_norm_eps": None, "layer_norm_eps": 1e-5, "hidden_size": 192, "head_dim": None, "use_qk_norm": True,
               "logit_scale": 0.4, "tie_word_embeddings": True, "eos_token_id": 2},
    # Layers without a window do not rotate.
    "cohere2": {**DENSE, "model_type": "cohere2", "rms_norm_eps": None, "layer_norm_eps": 1e-5, "hidden_size": 96, "logit_scale": 0.4,
                "layer_types": WINDOW_FIRST, "sliding_window": 16, "tie_word_embeddings": True, "eos_token_id": 2},
    # Queries and keys are normed after rotation; a stretched base.
    "hunyuan_v1_dense": {**DENSE, "model_type": "hunyuan_v1_dense", "rope_theta": None,
                         "rope_parameters": {"rope_type": "dynamic", "alpha": 30.0, "factor": 1.0, "rope_theta": 10000.0}},
    "hunyuan_v1_moe": {**DENSE, "model_type": "hunyuan_v1_moe", "num_experts": 5, "moe_topk": 2, "intermediate_size": 96},
    # Latent attention with temperature tuning; a router that takes softmax scores.
    "mistral4": {
        **LATENT, "model_type": "mistral4", "head_dim": None, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "n_group": 3, "topk_group": 2, "rope_theta": None, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5},
    },
    # Chunks of 16 tokens. The last layer does not rotate, has no chunks, and is tuned by
    # temperature.
    # Plain and expert layers in turn.
    "llama4": {
        **BASE, "model_type": "llama4_text", "num_hidden_layers": 4, "num_experts_per_tok": 1, "num_local_experts": 3, "moe_intermediate_size": None,
        "intermediate_size": 96, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 8,
        "attn_scale": 0.3, "head_dim": 32, "use_qk_norm": True,
    },
    # Stacks of experts as `[experts, inputs, outputs]`, gates and ups in one. Without images the
    # model is Qwen3-MoE.
    "qwen3_vl_moe_text": {**BASE, "model_type": "qwen3_moe", "num_experts": 6, "norm_topk_prob": True},
    # The same with gates and ups in turn, biases and sinks.
    # Compressed keys and values, of which an indexer selects 60 tokens.
    "deepseek_v32": {
        **LATENT, "model_type": "deepseek_v32", "head_dim": None, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "index_topk": 60, "index_head_dim": 32, "index_n_heads": 3, "rope_theta": None, "rope_parameters": YARN,
    },
    # The same; the third layer takes the second's selection.
    "glm_moe_dsa": {
        **LATENT, "model_type": "glm_moe_dsa", "head_dim": None, "num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 2, "index_topk": 60, "index_head_dim": 32, "index_n_heads": 3, "rope_theta": None,
        "indexer_types": ["full", "full", "shared"], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # Four residual streams; windows, tokens compressed by 4 with a selection, and by 16; experts
    # given by a table in the first layer; three groups of heads.
    "deepseek_v4": {
        **BASE, "model_type": "deepseek_v4", "intermediate_size": None, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 48,
        "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 3, "o_lora_rank": 32, "sliding_window": 24, "n_routed_experts": 6, "n_shared_experts": 1,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}, "num_hash_layers": 1, "index_n_heads": 3,
        "index_head_dim": 32, "index_topk": 15, "swiglu_limit": 0.7, "rms_norm_eps": 1e-6,
        "rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k and k != "rope_theta"},
    },
    # Two of three layers have the delta rule with a decay for each channel. Attention does not
    # rotate.
    "kimi_linear": KIMI_LINEAR,
    # Queries and keys so small that the epsilon of their unit vectors counts: 1e-6 on the sum of
    # squares, whatever rms_norm_eps is. `small_keys` rows of the convolutions are a thousandth.
    "qwen3_next_small_keys": {**QWEN3_NEXT, "num_experts": 5, "small_keys": 2 * 3 * 16},
    "kimi_linear_small_keys": {**KIMI_LINEAR, "rms_norm_eps": 1e-5, "small_keys": 2 * 5 * 32},
    # Four residual streams, of which the last norm reads the mean; decays with a bound; latent
    # attention that rotates nothing, to selected groups of 4 tokens.
    "glm5_next": {
        **LATENT, "model_type": "glm5_next_text", "qk_rope_head_dim": 0, "num_hidden_layers": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "linear_num_heads": 5, "linear_head_dim": 32, "linear_conv_kernel_dim": 4, "routed_scaling_factor": 2.5, "swiglu_limit": 0.7, "index_kpool": 4,
        "index_topk": 60, "index_head_dim": 32, "index_n_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": None, "pad_token_id": 0,
    },
    # Layers with one part each. Three groups of heads; experts without gates.
    "nemotron_h": {
        **NEMOTRON, "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention"],
    },
    # Experts that read and write narrower vectors, as Nemotron 3 Super's.
    "nemotron_h_latent": {**NEMOTRON, "layers_block_type": ["moe", "full_attention", "moe"], "moe_latent_size": 32},
    "gpt_oss": {
        **BASE, "model_type": "gpt_oss", "num_local_experts": 5, "moe_intermediate_size": None, "intermediate_size": 64, "num_experts_per_tok": 2,
        "layer_types": WINDOW_FIRST, "sliding_window": 16, "rope_theta": None,
        "rope_parameters": {**{k: v for k, v in YARN.items() if "mscale" not in k}, "truncate": False},
    },
    # Norms before, less one; embeddings scaled; GELU.
    "gemma": {**DENSE, "model_type": "gemma", "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
              "tie_word_embeddings": True},
    # GLM-4 before April 2025: norms before.
    "glm": {**DENSE, "model_type": "glm", "pad_token_id": 0, "eos_token_id": 2, "attention_bias": True, "partial_rotary_factor": 0.5},
    "helium": {**DENSE, "model_type": "helium", "hidden_size": 192, "num_key_value_heads": 2, "pad_token_id": 0},
    "internlm3": {**DENSE, "model_type": "internlm3", "hidden_size": 192, "attention_bias": True, "mlp_bias": True, "pad_token_id": 0},
    # MLPs without gates.
    "arcee": {**DENSE, "model_type": "arcee", "hidden_size": 192, "hidden_act": "relu2", "bos_token_id": 1, "eos_token_id": 2},
    # The second layer has a window.
    "cwm": {**DENSE, "model_type": "cwm", "hidden_size": 192, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"], "rope_theta": None, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}},
    # Only layers with a window rotate; norms before; a corrected sigmoid router.
    "exaone_moe": {**BASE, "model_type": "exaone_moe", "num_hidden_layers": 3, "num_experts": 6, "num_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 16,
                   "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    "dots1": {**BASE, "model_type": "dots1", "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
              "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
    "solar_open": {**BASE, "model_type": "solar_open", "intermediate_size": None, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                   "routed_scaling_factor": 1.5, "attention_bias": True},
    # Hunyuan 3: norms of heads, a corrected sigmoid router, names of its own.
    "hy_v3": {**BASE, "model_type": "hy_v3", "num_experts": 6, "num_shared_experts": 1, "router_scaling_factor": 2.826, "mlp_layer_types": ["dense", "sparse"]},
    # Norms of all queries and of all keys; norms before.
    "olmoe": {**BASE, "model_type": "olmoe", "intermediate_size": 96, "moe_intermediate_size": None, "num_experts": 6, "norm_topk_prob": False, "hidden_size": 96, "head_dim": None,
              "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    # Granite's factors; stacks of experts under names of their own.
    "granitemoe": {**BASE, "model_type": "granitemoe", "intermediate_size": 64, "moe_intermediate_size": None, "num_local_experts": 6, "hidden_size": 96, "head_dim": None,
                   "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5},
    "granitemoeshared": {**BASE, "model_type": "granitemoeshared", "intermediate_size": 64, "moe_intermediate_size": None, "num_local_experts": 6, "hidden_size": 96,
                         "head_dim": None, "shared_intermediate_size": 80, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
                         "logits_scaling": 1.5},
    # Granite 4: state spaces of one group in place of attention, which does not rotate.
    "granitemoehybrid": {**GRANITE4, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    # Of this one, attention rotates; no experts; two groups.
    "granitemoehybrid_dense": {**GRANITE4, "layer_types": ["attention", "mamba"], "position_embedding_type": "rope", "num_local_experts": 0, "mamba_n_groups": 3},
    # Gemma 2's caps and windows, norms before only.
    "vaultgemma": {**DENSE, "model_type": "vaultgemma", "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": WINDOW_FIRST, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 16, "tie_word_embeddings": True,
                   "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0},
    # MiniMax M3: clamped gates in experts and plain MLPs, norms less one. The second layer selects
    # 9 blocks of 8 tokens, which are all tokens of these prompts.
    "minimax_m3_vl_text": {**BASE, "model_type": "minimax_m3_vl_text", "moe_intermediate_size": None, "intermediate_size": 96, "dense_intermediate_size": 64,
                           "shared_intermediate_size": 64, "num_local_experts": 6, "mlp_layer_types": ["dense", "sparse"], "rotary_dim": 16,
                           "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 3, "index_head_dim": 32, "index_block_size": 8,
                           "index_topk_blocks": 9, "swiglu_limit": 0.7, "routed_scaling_factor": 2.0, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": None,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    # Layers with a window have a rotation of their own.
    "mellum": {**BASE, "model_type": "mellum", "num_experts": 6, "layer_types": WINDOW_FIRST, "mlp_layer_types": ["sparse", "dense"], "sliding_window": 16, "rope_theta": None,
               "norm_topk_prob": True,
               "rope_parameters": {
                   "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                   "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                                      "beta_fast": 32.0, "beta_slow": 1.0},
               }},
    "sarvam_mla": {**LATENT, "model_type": "sarvam_mla", "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
                   "rope_theta": None, "rope_parameters": YARN},
    # Gated short convolutions, attention, experts behind a plain MLP.
    "lfm2": {**DENSE, "model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "head_dim": None,
             "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 120, "block_multiple_of": 16, "conv_L_cache": 3, "norm_eps": 1e-5,
             "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True},
    "lfm2_moe": {**BASE, "model_type": "lfm2_moe", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "head_dim": None,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 64, "num_dense_layers": 1, "num_experts": 5, "norm_eps": 1e-5, "routed_scaling_factor": 1.5,
                 "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True},
    # A gate for each head, norms around, windows with rotations of their own.
    "lfm3": {**DENSE, "model_type": "lfm3", "num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 16,
             "conv_L_cache": 7, "norm_eps": 1e-5, "num_attention_heads": 3, "num_key_value_heads": 3, "rope_theta": None,
             "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                                 "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True},
    # Latent attention without experts, halves rotated; factors.
    "minicpm3": {**{key: value for key, value in LATENT.items() if key not in ("n_shared_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")},
                 "model_type": "minicpm3", "scale_emb": 3.0, "scale_depth": 0.6, "dim_model_base": 40, "tie_word_embeddings": True, "rope_theta": None,
                 "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 8 for i in range(8)],
                                     "long_factor": [1.5 + i / 2 for i in range(8)], "original_max_position_embeddings": 16}},
    "gemma4_unified_text": {**{key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}, "model_type": "gemma4_unified_text"},
    # OLMo 2's norms, with experts.
    "flex_olmo": {**BASE, "model_type": "flex_olmo", "intermediate_size": 48, "moe_intermediate_size": None, "num_experts": 4, "norm_topk_prob": False,
                  "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    # Norms around; logits multiplied.
    "hyperclovax": {**DENSE, "model_type": "hyperclovax", "head_dim": None, "hidden_size": 96, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                    "attention_multiplier": 0.2, "logits_scaling": 0.6},
    # Windows that rotate, sinks, a plain sigmoid router, a shared expert without a gate.
    "flint": {**BASE, "model_type": "flint", "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0],
              "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "norm_topk_prob": True},
    # Queries, keys and values in one tensor, under names of its own.
    "sarvam_moe": {**BASE, "model_type": "sarvam_moe", "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                   "routed_scaling_factor": 2.5, "use_qk_norm": True},
    # Granite with windows, sinks and a base for each layer; the last does not rotate.
    "granite_swa": {**DENSE, "model_type": "granite_swa", "num_hidden_layers": 4, "head_dim": None, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 32, "embedding_multiplier": 3.0,
                    "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5, "sliding_window": 16,
                    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"], "layer_rope_theta": [10000.0, 1000.0, 10000.0, 0],
                    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    "granitemoe_swa": {**BASE, "model_type": "granitemoe_swa", "intermediate_size": 32, "moe_intermediate_size": None, "num_local_experts": 4, "hidden_size": 48,
                       "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None, "shared_intermediate_size": 48, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
                       "logits_scaling": 1.5, "sliding_window": 16, "layer_types": WINDOW_FIRST, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    # Latent attention without experts.
    "youtu": {**{key: value for key, value in LATENT.items() if key not in ("n_shared_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")},
              "model_type": "youtu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    # The plain ones, which MLX-LM has too.
    "llama": {**DENSE, "model_type": "llama", "hidden_size": 96, "head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_theta": None, "bos_token_id": 1, "eos_token_id": 2,
              "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 32}},
    "iquestcoder": {**DENSE, "model_type": "iquestcoder", "hidden_size": 96, "head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen2": {**DENSE, "model_type": "qwen2", "head_dim": None, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3": {**DENSE, "model_type": "qwen3"},
    "mistral": {**DENSE, "model_type": "mistral", "sliding_window": 16},
    # Temperature tuning of queries.
    "ministral3": {**DENSE, "model_type": "ministral3", "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 83, "rope_theta": None,
                   "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                                       "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
    # Models that see, with language models in a `text_config`. `vision`: the encoder of images.
    "kimi_k25": {**LATENT, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
                 "rope_theta": None, "rope_parameters": YARN, "wrapper": "kimi_k25",
                 "vision": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16, "pos_emb_height": 2, "pos_emb_width": 2}},
    "glm4v": {**DENSE, "model_type": "glm4v_text", "pad_token_id": 0, "attention_bias": True, "head_dim": None, "hidden_size": 96, "num_attention_heads": 3,
              "num_key_value_heads": 1, "intermediate_size": 64, "rope_theta": None,
              "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
              "wrapper": "glm4v", "vision": {**SEES, "out_hidden_size": 96}},
    "glm4v_moe": {**BASE, "model_type": "glm4v_moe_text", "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                  "routed_scaling_factor": 2.5, "attention_bias": True, "rope_theta": None,
                  "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
                  "wrapper": "glm4v_moe", "vision": SEES},
    "exaone4_5": {**DENSE, "model_type": "exaone4", "layer_types": WINDOW_FIRST, "sliding_window": 16, "wrapper": "exaone4_5",
                  "vision": {**SEES, "num_key_value_heads": 1, "fullatt_block_indexes": [0]}},
    "qwen2_vl": {**DENSE, "model_type": "qwen2_vl_text", "head_dim": None, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_theta": None,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
                 "wrapper": "qwen2_vl", "vision": {"depth": 1, "embed_dim": 16, "hidden_size": 96, "num_heads": 1, "mlp_ratio": 1, "patch_size": 2}},
    "qwen2_5_vl": {**DENSE, "model_type": "qwen2_5_vl_text", "head_dim": None, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_theta": None,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
                   "wrapper": "qwen2_5_vl", "vision": {**SEES, "out_hidden_size": 96, "fullatt_block_indexes": [0]}},
    "cohere2_vision": {**DENSE, "model_type": "cohere2", "rms_norm_eps": None, "layer_norm_eps": 1e-5, "hidden_size": 96, "logit_scale": 1.0, "head_dim": None,
                       "layer_types": WINDOW_FIRST, "sliding_window": 16, "tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1,
                       "pad_token_id": 0, "wrapper": "cohere2_vision", "outer": {"alignment_intermediate_size": 16},
                       "vision": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16, "image_size": 16, "patch_size": 8}},
    "minimax_m3_vl": {**BASE, "model_type": "minimax_m3_vl_text", "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 83,
                      "moe_intermediate_size": None, "intermediate_size": 32, "dense_intermediate_size": 64, "shared_intermediate_size": 64, "num_local_experts": 4,
                      "mlp_layer_types": ["dense", "sparse"], "rotary_dim": 16, "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
                      "index_head_dim": 32, "index_block_size": 8, "index_topk_blocks": 9, "swiglu_limit": 0.7, "routed_scaling_factor": 2.0, "bos_token_id": 1,
                      "eos_token_id": 2, "rope_theta": None,
                      "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, "wrapper": "minimax_m3_vl",
                      "outer": {"projector_hidden_size": 16, "image_token_index": 81, "video_token_index": 82},
                      "vision": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16, "image_size": 8, "patch_size": 2}},
    "qwen3_5_moe_wrapped": {**DELTA, "model_type": "qwen3_5_moe_text", "num_experts": 6, "shared_expert_intermediate_size": 64, "wrapper": "qwen3_5_moe",
                            "vision": {**SEES, "num_position_embeddings": 4}},
    "gemma4_wrapped": {**GEMMA4, "wrapper": "gemma4", "vision": None},
    "gemma4_unified": {**{key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}, "model_type": "gemma4_unified_text",
                       "wrapper": "gemma4_unified", "vision": None},
}


# Published checkpoints have the experts in stacks, the gates' rows before the ups'.
STACKED = ("qwen3_5_moe", "qwen3_vl_moe_text")
# Those of Qwen3-VL are `[experts, inputs, outputs]`.
TRANSPOSED = ("qwen3_vl_moe_text",)


def stack_experts(path, transposed):
    tensors = load_file(path)
    for layer in sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key}):
        stacks = {}
        for matrix in ("gate", "up", "down"):
            names = [f"{layer}.experts.{i}.{matrix}_proj.weight" for i in range(len(tensors))]
            stacks[matrix] = torch.stack([tensors.pop(name) for name in names if name in tensors])
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([stacks["gate"], stacks["up"]], 1)
        tensors[f"{layer}.experts.down_proj"] = stacks["down"]
        for name in ("gate_up_proj", "down_proj") if transposed else ():
            tensors[f"{layer}.experts.{name}"] = tensors[f"{layer}.experts.{name}"].transpose(1, 2).contiguous()
    write(path, tensors)


def write(path, tensors):
    raw = {key: ("BF16", list(value.shape), value.view(torch.int16).numpy().tobytes()) for key, value in tensors.items()}
    fixture.write_safetensors(path, raw)


def rename(path, old, new):
    write(path, {key.replace(old, new): value for key, value in load_file(path).items()})


def random_weight(rng, name, shape, layers, less_one, after, transposed=False):
    """A weight about as large as in a trained model; norms near 1 (stored less one, if `less_one`; smaller, if `after` a part), biases off zero, routers
    that decide."""
    if "norm" in name:
        gain = 0.5 / layers if after else 1.0
        return gain * np.exp(0.2 * rng.standard_normal(shape)) - (1.0 if less_one else 0.0)
    if name.endswith(("hc.base", "hc.scale", "hc_base", "hc_scale")):
        return 0.5 * rng.standard_normal(shape) + (1.0 if name.endswith("scale") else 0.0)
    if name.endswith(("position_bias", "compress_ape")):
        return 0.5 * rng.standard_normal(shape)
    if name.endswith(("A_log", "dt_bias", "mixer.D", "mamba.D")):
        return rng.standard_normal(shape)
    if "conv1d.weight" in name or name.endswith("conv.conv.weight"):
        return rng.standard_normal(shape) / np.sqrt(shape[-1])
    if name.endswith("router.scale"):
        return np.sqrt(shape[0]) * np.exp(0.2 * rng.standard_normal(shape))
    if name.endswith("per_expert_scale"):
        return np.exp(0.4 * rng.standard_normal(shape))
    if name.endswith("layer_scalar"):
        return np.full(shape, 0.75)
    if name.endswith("sinks"):
        return rng.standard_normal(shape)
    if name.endswith(("bias", "_bias")):
        return (0.1 if "correction" in name or "expert_bias" in name else 0.3) * rng.standard_normal(shape)
    gain = 0.8
    if name.endswith(("o_proj.weight", "o_b_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "feed_forward.w2.weight")):
        gain /= np.sqrt(2 * layers)
    elif "lm_head" in name:
        gain = 2.5
    elif "embed" in name:
        gain = np.sqrt(shape[-1])
    elif name.endswith(("mlp.gate.weight", "mlp.gate.wg.weight", "router.weight", "router.proj.weight", "mixer.gate.weight", "feed_forward.gate.weight")):
        gain = 2.0
    if transposed:
        return gain / np.sqrt(shape[-2]) * rng.standard_normal(shape)
    return gain / np.sqrt(shape[-1]) * rng.standard_normal(shape)


def make(name, settings, folder):
    rng = fixture.generator(name)
    # A null q_lora_rank is a value; other nulls leave a key to its default.
    settings = {key: value for key, value in settings.items() if value is not None or key == "q_lora_rank"}
    model_type, small = settings.pop("model_type"), settings.pop("small_keys", 0)
    wrapper, vision = settings.pop("wrapper", None), settings.pop("vision", None)
    outer = {"tie_word_embeddings": settings["tie_word_embeddings"], **settings.pop("outer", {})}
    if wrapper:
        text = {**settings, "model_type": model_type}
        config = AutoConfig.for_model(wrapper, text_config=text, vision_config=vision, **outer)
    elif model_type == "glm5_next_text":
        # Only known as a part of a model with an encoder of images, here a small one.
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32, "projection_intermediate_size": 32}
        config = AutoConfig.for_model("glm5_next", text_config={**settings, "tie_word_embeddings": False}, vision_config=vision)
    else:
        config = AutoConfig.for_model(model_type, **settings)
    config._attn_implementation = "eager"
    # Some language models are only known to transformers as parts of others.
    auto = {"mistral4": Mistral4ForCausalLM, "glm5_next_text": Glm5NextForConditionalGeneration}.get(model_type, AutoModelForCausalLM)
    auto = AutoModelForImageTextToText if wrapper else auto
    build = auto.from_config if auto in (AutoModelForCausalLM, AutoModelForImageTextToText) else auto._from_config
    model = build(config, dtype=torch.float32)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    transposed = model_type in ("llama4_text", "gpt_oss")
    with torch.no_grad():
        named = list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if "correction" in n or "layer_scalar" in n or "expert_bias" in n]
        for key, value in sorted(named, key=lambda pair: pair[0]):
            # Families that store norms less one begin with zeros.
            less_one = not value.any().item()
            after = fixture.is_after_norm(key, [name for name, _ in named])
            value.copy_(torch.from_numpy(random_weight(rng, key, tuple(value.shape), layers, less_one, after, transposed and value.dim() == 3)))
        for _, table in sorted((n, b) for n, b in model.named_buffers() if n.endswith("tid2eid")):
            rows = [rng.permutation(config.n_routed_experts)[: table.shape[1]] for _ in range(table.shape[0])]
            table.copy_(torch.from_numpy(np.stack(rows)))
        for key, value in named if small else ():
            if "conv1d.weight" in key:
                value[:small] *= 1e-3
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if wrapper == "kimi_k25":
        # Transformers 5.24 writes the language model's layers under the encoder's name for them.
        rename(folder / "model.safetensors", "language_model.model.blocks.", "language_model.model.layers.")
    if name in STACKED:
        stack_experts(folder / "model.safetensors", name in TRANSPOSED)
    if name in TRANSPOSED:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace(f'"{model_type}"', f'"{name}"'))

    def forward(tokens):
        with torch.no_grad():
            return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float().numpy()

    return fixture.write_golden(name, text.vocab_size, forward, folder)


if __name__ == "__main__":
    fixture.main(
        __doc__, {name: (f"transformers-{name}", partial(make, name, settings)) for name, settings in CASES.items()}
    )
