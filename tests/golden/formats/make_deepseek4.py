#!/usr/bin/env python3
"""Makes the golden folder deepseek_v4-fp8: a small DeepSeek V4 as it is published, with transformers' logits for the exact values of its bytes.

    python3 tests/golden/formats/make_deepseek4.py [--out DIR] [NAME...]

Projections are E4M3 with a power of two for each block, experts 4-bit floats with one for each 32 columns, all else bf16 or f32. Needs PyTorch and
transformers 5.24, which reads the published names. Every random number comes from a generator seeded with the case's name.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import fixture
from make_transformers import random_weight

BLOCK = 32
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The words of published files. Of 70 tokens, none are compressed by 128.
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 48, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 3, "o_lora_rank": 32,
    "vocab_size": 163, "max_position_embeddings": 256, "sliding_window": 24, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1, "index_n_heads": 3, "index_head_dim": 32, "index_topk": 15, "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1},
}
QUANTIZATION = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK], "expert_dtype": "fp4",
}  # fmt: skip


def raw(value: torch.Tensor, kind: str) -> tuple:
    return kind, list(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()


def exponents(largest: torch.Tensor, most: float) -> torch.Tensor:
    """The exponents of the powers of two that bring numbers down to `most`."""
    return torch.ceil(torch.log2(largest.clamp(min=1e-4) / most))


def fp8(value: torch.Tensor) -> tuple:
    """Bytes, exponents of blocks, and the values that they stand for."""
    rows, cols = value.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-cols // BLOCK) * BLOCK)
    padded[:rows, :cols] = value
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    exponent = exponents(blocks.abs().amax((1, 3)), 448.0)
    scale = (2.0**exponent).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    codes = (value / scale).to(torch.float8_e4m3fn)
    return codes, (exponent + 127).to(torch.uint8), codes.float() * scale


def fp4(value: torch.Tensor) -> tuple:
    """Bytes, exponents of groups, and the values that they stand for."""
    groups = value.view(value.shape[0], -1, 32)
    exponent = exponents(groups.abs().amax(2), 6.0)
    scaled = groups / (2.0**exponent)[..., None]
    code = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    values = (FP4[code] * scaled.sign() * (2.0**exponent)[..., None]).view(value.shape)
    code = (code + 8 * (scaled < 0)).view(value.shape[0], -1, 2)
    return (code[..., 0] + 16 * code[..., 1]).to(torch.uint8), (exponent + 127).to(torch.uint8), values


def published(name: str) -> str:
    """Published files have no prefix and, for one norm, a name that transformers does not write."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def make(name: str, folder: Path):
    rng = fixture.generator(name)
    tensors, values = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(CONFIG))
        from transformers import AutoConfig

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(temporary), dtype=torch.float32)
        model.save_pretrained(temporary)
        from safetensors.torch import load_file, save_file

        for key, value in sorted(load_file(Path(temporary) / "model.safetensors").items()):
            key, shape = published(key), tuple(value.shape)
            if key.endswith("tid2eid"):
                table = np.stack([rng.permutation(CONFIG["n_routed_experts"])[: shape[1]] for _ in range(shape[0])])
                values[key] = torch.from_numpy(table)
                tensors[key] = ("I64", list(shape), table.astype(np.int64).tobytes())
                continue
            if key.endswith(("_base", "_scale")):
                number = 0.5 * rng.standard_normal(shape) + (1.0 if key.endswith("_scale") else 0.0)
            elif key.endswith((".ape", "attn_sink", "gate.bias")):
                number = (0.1 if "gate" in key else 0.5) * rng.standard_normal(shape)
            else:
                words = {"wo_b": "o_proj", "w2": "down_proj", "head.weight": "lm_head", "ffn.gate.weight": "mlp.gate.weight"}
                similar = key
                for word, usual in words.items():
                    similar = similar.replace(word, usual)
                number = random_weight(rng, similar, shape, CONFIG["num_hidden_layers"], False, False)
            value = torch.from_numpy(np.asarray(number)).float()
            module = key.removesuffix(".weight")
            if ".ffn.experts." in key:
                codes, scales, values[key] = fp4(value)
                tensors[key], tensors[f"{module}.scale"] = raw(codes, "I8"), raw(scales, "F8_E8M0")
            elif module.endswith(("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3")):
                codes, scales, values[key] = fp8(value)
                tensors[key], tensors[f"{module}.scale"] = raw(codes, "F8_E4M3"), raw(scales, "F8_E8M0")
            elif "norm" in key or "hc_" in key or key.endswith((".ape", "attn_sink", "gate.bias")):
                values[key], tensors[key] = value, raw(value, "F32")
            else:
                values[key] = value.to(torch.bfloat16).float()
                tensors[key] = raw(value.to(torch.bfloat16), "BF16")
        save_file({key: value.contiguous() for key, value in values.items()}, Path(temporary) / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(temporary, dtype=torch.float32, attn_implementation="eager").eval()
        # Every value must have found its place.
        assert torch.equal(model.model.layers[1].self_attn.kv_norm.weight, values["layers.1.attn.kv_norm.weight"])
        assert torch.equal(model.model.hc_head.hc_fn, values["hc_head_fn"])
        assert torch.equal(model.model.layers[1].self_attn.compressor.indexer.kv_norm.weight, values["layers.1.attn.indexer.compressor.norm.weight"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": QUANTIZATION}, indent=1))
    fixture.write_safetensors(folder / "model.safetensors", tensors)

    def forward(tokens):
        with torch.no_grad():
            return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float().numpy()

    return fixture.write_golden(name, CONFIG["vocab_size"], forward, folder)


if __name__ == "__main__":
    fixture.main(__doc__, {"deepseek_v4-fp8": ("deepseek_v4-fp8", partial(make, "deepseek_v4-fp8"))})
