#!/usr/bin/env python3
"""Makes the golden fixtures of families with experts and latent attention: folders as transformers writes them, with random
weights in bf16, and the logits that transformers computes for them in f32.

    python3 tests/golden/make_transformers.py [--out DIR] [NAME...]

Needs PyTorch and transformers 5.17. Every random number comes from a generator seeded with the case's name, so each
folder can be made alone. README.md says what is in the files.
"""

from functools import partial

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
}


def random_weight(rng, name, shape, layers):
    """A weight about as large as in a trained model; norms near 1, biases off zero, routers that decide."""
    if "norm" in name:
        return np.exp(0.2 * rng.standard_normal(shape))
    if name.endswith("bias"):
        return (0.1 if "correction" in name else 0.3) * rng.standard_normal(shape)
    gain = 0.8
    if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
        gain /= np.sqrt(2 * layers)
    elif "lm_head" in name:
        gain = 2.5
    elif "embed_tokens" in name:
        gain = np.sqrt(shape[-1])
    elif name.endswith("mlp.gate.weight"):
        gain = 2.0
    return gain / np.sqrt(shape[-1]) * rng.standard_normal(shape)


def make(name, settings, folder):
    rng = fixture.generator(name)
    # A null q_lora_rank is a value; other nulls leave a key to its default.
    settings = {key: value for key, value in settings.items() if value is not None or key == "q_lora_rank"}
    model_type = settings.pop("model_type")
    config = AutoConfig.for_model(model_type, **settings)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layers = config.num_hidden_layers
    with torch.no_grad():
        named = list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if "correction" in n]
        for key, value in sorted(named, key=lambda pair: pair[0]):
            value.copy_(torch.from_numpy(random_weight(rng, key, tuple(value.shape), layers)))
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def forward(tokens):
        with torch.no_grad():
            return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float().numpy()

    return fixture.write_golden(name, config.vocab_size, forward, folder)


if __name__ == "__main__":
    fixture.main(
        __doc__, {name: (f"transformers-{name}", partial(make, name, settings)) for name, settings in CASES.items()}
    )
