#!/usr/bin/env python3
"""Makes the golden folders of quantized formats that are not MLX's affine one, and MLX-LM's logits for their exact values.

    python3 tests/golden/formats/make.py [--out DIR] [NAME...]

Needs the packages of ../requirements.txt. Every random number comes from a generator seeded with the case's name. README.md says
which formats there are and where each was read up.
"""

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Callable

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, _transform_awq_weights

sys.path.insert(0, str(Path(__file__).parents[1]))
import fixture
from cases import GPT_OSS, dense
from make import random_weight

# ------------------------------------------------------------------------------------------------
# Formats: each takes f32 weights [rows, cols] and gives the tensors by the end of their names,
# (type, shape, bytes), and the values that the written bytes stand for, which are decoded from
# these bytes.


def tensor(array: np.ndarray, kind: str) -> tuple:
    return kind, array.shape, np.ascontiguousarray(array).tobytes()


def bf16(values: np.ndarray) -> tuple:
    """Values as bf16: the tensor, and the values in f32."""
    array = mx.array(np.ascontiguousarray(values, np.float32)).astype(mx.bfloat16)
    return ("BF16", values.shape, np.array(array.view(mx.uint16)).tobytes()), np.array(array.astype(mx.float32))


def pack(numbers: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Numbers in 32-bit words along an axis, the earliest in the lowest bits."""
    numbers = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    per = 32 // bits
    words = numbers.reshape(*numbers.shape[:-1], -1, per) << (np.arange(per, dtype=np.uint32) * bits)
    return np.moveaxis(words.sum(-1, dtype=np.uint32), -1, axis)


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The numbers of words along an axis."""
    words = np.moveaxis(words, axis, -1)
    numbers = words[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits) & (2**bits - 1)
    return np.moveaxis(numbers.reshape(*words.shape[:-1], -1), -1, axis).astype(np.int64)


def levels(values: np.ndarray, group: int, bits: int, symmetric: bool) -> tuple:
    """Levels [rows, cols], scales and zeros [rows, groups] of round-to-nearest quantization; a group of 0 is a row."""
    rows, cols = values.shape
    groups = values.reshape(rows, -1, group or cols)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = np.abs(groups).max(-1) / (middle - 0.5)
        zeros = np.full(scales.shape, middle)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(np.int64)
    scales = scales.astype(np.float16).astype(np.float32)
    numbers = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, top)
    return numbers.reshape(rows, cols).astype(np.int64), scales, zeros


def spread(numbers: np.ndarray, cols: int) -> np.ndarray:
    """[rows, groups] as [rows, cols]."""
    return np.repeat(numbers, cols // numbers.shape[1], axis=1)


def gptq(values, *, bits=4, group=32, symmetric=False, add=1) -> tuple:
    """AutoGPTQ: words along the columns, zeros less one (`add`), everything transposed."""
    numbers, scales, zeros = levels(values, group, bits, symmetric)
    if add and not symmetric:
        # The first version cannot store a zero of 0 other than as the largest number.
        assert (zeros == 0).sum() == 0 or bits == 4
    cols = values.shape[1]
    words = pack(numbers.T, bits, 0)
    zero_words = pack((zeros.T - add) % 2**bits, bits, 1)
    tensors = {
        ".qweight": tensor(words.view(np.int32), "I32"),
        ".qzeros": tensor(zero_words.view(np.int32), "I32"),
        ".scales": tensor(scales.T.astype(np.float16), "F16"),
        ".g_idx": tensor((np.arange(cols) // (group or cols)).astype(np.int32), "I32"),
    }
    found = (unpack(zero_words, bits, 1) + add) % 2**bits
    return tensors, spread(scales, cols) * (unpack(words, bits, 0).T - spread(found.T, cols))


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(values, *, group=32) -> tuple:
    """AutoAWQ's GEMM version: words along the rows in an order of their own, everything transposed."""
    numbers, scales, zeros = levels(values, group, 4, False)

    def ordered(array):
        return array.reshape(array.shape[0], -1, 8)[..., AWQ_ORDER].reshape(array.shape)

    words, zero_words = (pack(ordered(array.T), 4, 1) for array in (numbers, zeros))
    tensors = {
        ".qweight": tensor(words.view(np.int32), "I32"),
        ".qzeros": tensor(zero_words.view(np.int32), "I32"),
        ".scales": tensor(scales.T.astype(np.float16), "F16"),
    }
    # MLX-LM's own reading of these tensors, whose offsets are rounded to f16.
    arrays = {"x.qweight": mx.array(words.view(np.int32)), "x.qzeros": mx.array(zero_words.view(np.int32)),
              "x.scales": mx.array(scales.T.astype(np.float16))}  # fmt: skip
    read, settings = _transform_awq_weights(arrays, {"bits": 4, "group_size": group})
    theirs = mx.dequantize(read["x.weight"], read["x.scales"].astype(mx.float32), read["x.biases"].astype(mx.float32),
                           group, 4)  # fmt: skip
    inverse = np.argsort(AWQ_ORDER)
    numbers, zeros = (unpack(w, 4, 1).reshape(w.shape[0], -1, 8)[..., inverse].reshape(w.shape[0], -1)
                      for w in (words, zero_words))  # fmt: skip
    exact = spread(scales, values.shape[1]) * (numbers.T - spread(zeros.T, values.shape[1]))
    assert np.abs(exact - np.array(theirs)).max() <= 2**-10 * np.abs(scales).max() * 16
    return tensors, exact


def packed_integers(values, *, bits=4, group=32, symmetric=True) -> tuple:
    """compressed-tensors' pack-quantized: words along the columns; levels are signed numbers plus half of their range."""
    numbers, scales, zeros = levels(values, group, bits, symmetric)
    stored, scales = bf16(scales)
    numbers = np.clip(np.rint(values / spread(scales, values.shape[1])) + spread(zeros, values.shape[1]), 0, 2**bits - 1)
    words = pack(numbers, bits, 1)
    tensors = {
        ".weight_packed": tensor(words.view(np.int32), "I32"),
        ".weight_scale": stored,
        ".weight_shape": tensor(np.array(values.shape, np.int64), "I64"),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = tensor(pack(zeros, bits, 0).view(np.int32), "I32")
    cols = values.shape[1]
    return tensors, spread(scales, cols) * (unpack(words, bits, 1) - spread(zeros, cols))


def fp8(values, *, block=(128, 128), scale_name=".weight_scale_inv", scale_shape=None) -> tuple:
    """E4M3 bytes with a scale for each block, which multiplies; a block of 0 is a whole row or column. MLX decodes the bytes."""
    rows, cols = values.shape
    height, width = block[0] or rows, block[1] or cols
    down, across = -(-rows // height), -(-cols // width)
    padded = np.zeros((down * height, across * width), np.float32)
    padded[:rows, :cols] = values
    scales = np.abs(padded.reshape(down, height, across, width)).max((1, 3)) / 448
    full = np.repeat(np.repeat(scales, height, 0), width, 1)[:rows, :cols].astype(np.float32)
    codes = np.array(mx.to_fp8(mx.array((values / full).astype(np.float32))))
    decoded = np.array(mx.from_fp8(mx.array(codes), dtype=mx.float32))
    shape = scales.shape if scale_shape is None else scale_shape
    tensors = {
        ".weight": ("F8_E4M3", values.shape, codes.tobytes()),
        scale_name: ("F32", shape, scales.astype(np.float32).tobytes()),
    }
    return tensors, decoded * full


def mlx_mode(values, *, mode) -> tuple:
    """MLX's own packing and decoding."""
    weight, scales = mx.quantize(mx.array(values.astype(np.float32)), mode=mode)
    tensors = {".weight": tensor(np.array(weight), "U32"), ".scales": tensor(np.array(scales), "U8")}
    return tensors, np.array(mx.dequantize(weight, scales, mode=mode, dtype=mx.float32))


def mxfp4_blocks(values) -> tuple:
    """gpt-oss's `_blocks` and `_scales`: MLX's mxfp4, 16 bytes a group."""
    weight, scales = mx.quantize(mx.array(values.astype(np.float32)), mode="mxfp4")
    blocks = np.array(weight).view(np.uint8).reshape(len(values), -1, 16)
    tensors = {"_blocks": tensor(blocks, "U8"), "_scales": tensor(np.array(scales), "U8")}
    return tensors, np.array(mx.dequantize(weight, scales, mode="mxfp4", dtype=mx.float32))


# ------------------------------------------------------------------------------------------------
# Models.


@dataclass(frozen=True)
class Case:
    """One folder. `quantization` is what config.json says; modules of matrices whose name holds one of `modules` are stored by
    `format`, everything else in bf16."""

    name: str
    config: dict
    format: Callable
    quantization: dict
    key: str = "quantization_config"
    modules: tuple = ("_proj",)
    # Config keys that MLX-LM is given instead.
    reference: dict = field(default_factory=dict)


def compressed(format, **weights) -> dict:
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "symmetric": True, **weights}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {"config_groups": {"group_0": group}, "format": format, "ignore": ["lm_head"], "quant_method": "compressed-tensors",
            "quantization_status": "compressed"}  # fmt: skip


def deepseek(**more) -> dict:
    config = dense("llama", 128, 256, 4, 4, 163, tied=False, head_dim=None)
    return {**config, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4,
            "n_shared_experts": 1, "moe_intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_experts_per_tok": 4,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            **more}  # fmt: skip


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
CASES = [
    Case("gpt_oss-mxfp4_blocks", GPT_OSS, mxfp4_blocks, {"quant_method": "mxfp4"}, modules=("experts.",)),
    Case("deepseek_v3-fp8", deepseek(), fp8, {**FP8, "weight_block_size": [128, 128]}),
    # As Ministral 3: one scale a matrix, of no dimension.
    Case("llama-fp8-tensor", dense("llama", 64, 96, 4, 2, 163), partial(fp8, block=(0, 0), scale_shape=()),
         {**FP8, "activation_scheme": "static", "weight_block_size": None}),
    Case("qwen3-fp8-channel", dense("qwen3", 64, 96, 4, 2, 163),
         partial(fp8, block=(1, 0), scale_name=".weight_scale"),
         compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    # As Kimi K2 Thinking: routed experts only.
    Case("kimi_k2-int4-g32", deepseek(model_type="kimi_k2", moe_intermediate_size=96), packed_integers,
         compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32), modules=("experts.",)),
    Case("llama-int4-g32-zeros", dense("llama", 64, 96, 6, 2, 163), partial(packed_integers, symmetric=False),
         compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)),
    Case("llama-int8-channel", dense("llama", 128, 128, 4, 2, 163), partial(packed_integers, bits=8, group=0),
         compressed("pack-quantized", num_bits=8, type="int", strategy="channel")),
    Case("qwen2-gptq-g32", dense("qwen2", 64, 160, 4, 2, 163, head_dim=None), partial(gptq, symmetric=True),
         {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
    Case("llama-gptq_v2-g64", dense("llama", 128, 192, 6, 3, 163), partial(gptq, group=64, add=0),
         {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False,
          "checkpoint_format": "gptq_v2"}),
    Case("llama-gptq-8bit-row", dense("llama", 128, 128, 4, 2, 163), partial(gptq, bits=8, group=0, symmetric=True),
         {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True}),
    Case("qwen3-awq-g32", dense("qwen3", 64, 160, 6, 3, 163, head_dim=16), awq,
         {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    Case("llama-mxfp8", dense("llama", 64, 96, 4, 2, 163), partial(mlx_mode, mode="mxfp8"),
         {"group_size": 32, "bits": 8, "mode": "mxfp8"}, key="quantization", modules=("_proj", "embed_tokens")),
    Case("qwen3-nvfp4", dense("qwen3", 64, 96, 4, 2, 163), partial(mlx_mode, mode="nvfp4"),
         {"group_size": 16, "bits": 4, "mode": "nvfp4"}, key="quantization", modules=("_proj", "embed_tokens")),
]  # fmt: skip


def shapes(config: dict) -> dict:
    """Hugging Face's tensors of a model by name."""
    hidden, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    found = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        attention = latent(config) if "kv_lora_rank" in config else grouped(config, heads)
        found |= {f"{at}self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"{at}mlp.{name}": shape for name, shape in feed_forward(config, layer).items()}
    return found


def grouped(config, heads) -> dict:
    hidden, width = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // heads
    queries, keys = heads * width, config["num_key_value_heads"] * width
    found = {"q_proj.weight": (queries, hidden), "k_proj.weight": (keys, hidden), "v_proj.weight": (keys, hidden),
             "o_proj.weight": (hidden, queries)}  # fmt: skip
    if config["model_type"] == "qwen3":
        found |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    if config["model_type"] in ("qwen2", "gpt_oss"):
        found |= {"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
    if config["model_type"] == "gpt_oss":
        found |= {"o_proj.bias": (hidden,), "sinks": (heads,)}
    return found


def latent(config) -> dict:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries = config["q_lora_rank"]
    return {"q_a_proj.weight": (queries, hidden), "q_a_layernorm.weight": (queries,),
            "q_b_proj.weight": (heads * (plain + rotated), queries), "kv_a_proj_with_mqa.weight": (rank + rotated, hidden),
            "kv_a_layernorm.weight": (rank,), "kv_b_proj.weight": (heads * (plain + values), rank),
            "o_proj.weight": (hidden, heads * values)}  # fmt: skip


def gated(hidden, channels) -> dict:
    return {"gate_proj.weight": (channels, hidden), "up_proj.weight": (channels, hidden), "down_proj.weight": (hidden, channels)}


def feed_forward(config, layer) -> dict:
    hidden = config["hidden_size"]
    if config["model_type"] == "gpt_oss":
        experts, channels = config["num_local_experts"], config["intermediate_size"]
        return {"router.weight": (experts, hidden), "router.bias": (experts,),
                "experts.gate_up_proj": (experts, 2 * channels, hidden), "experts.gate_up_proj_bias": (experts, 2 * channels),
                "experts.down_proj": (experts, hidden, channels), "experts.down_proj_bias": (experts, hidden)}  # fmt: skip
    if "n_routed_experts" not in config or layer < config["first_k_dense_replace"]:
        return gated(hidden, config["intermediate_size"])
    found = {"gate.weight": (config["n_routed_experts"], hidden), "gate.e_score_correction_bias": (config["n_routed_experts"],)}
    parts = {f"experts.{i}": config["moe_intermediate_size"] for i in range(config["n_routed_experts"])}
    parts["shared_experts"] = config["n_shared_experts"] * config["moe_intermediate_size"]
    for part, channels in parts.items():
        found |= {f"{part}.{name}": shape for name, shape in gated(hidden, channels).items()}
    return found


def is_quantized(case: Case, name: str, shape) -> bool:
    is_matrix = len(shape) >= 2 and not name.endswith("bias") and "shared_experts" not in case.modules
    excluded = "shared_experts." in name and case.modules == ("experts.",)
    return is_matrix and not excluded and any(module in name for module in case.modules)


def store(case: Case, name: str, values: np.ndarray) -> tuple:
    """The tensors of a module by name, and their values in f32."""
    if not is_quantized(case, name, values.shape):
        stored, values = bf16(values)
        return {name: stored}, values
    module = name.removesuffix(".weight")
    if values.ndim == 2:
        tensors, values = case.format(values)
        return {module + end: stored for end, stored in tensors.items()}, values
    # A stack: each matrix by itself.
    each = [case.format(matrix) for matrix in values]
    joined = {}
    for end, (kind, shape, _) in each[0][0].items():
        joined[module + end] = (kind, (len(each), *shape), b"".join(tensors[end][2] for tensors, _ in each))
    return joined, np.stack([values for _, values in each])


def reference(case: Case, values: dict):
    """MLX-LM's model with these values, under Hugging Face's names, in f32."""
    config = {**case.config, **case.reference}
    if config["model_type"] == "gpt_oss":
        # The class takes these apart by halves; its own reading of `_blocks` would round to bf16.
        for name in [name for name in values if "gate_up_proj" in name]:
            stack = values.pop(name)
            end = ".bias" if name.endswith("bias") else ".weight"
            for turn, part in enumerate(("gate_proj", "up_proj")):
                values[name.removesuffix("_bias").replace("gate_up_proj", part) + end] = stack[:, turn::2]
        for name in [name for name in values if "experts.down_proj" in name]:
            end = ".bias" if name.endswith("bias") else ".weight"
            values[name.removesuffix("_bias") + end] = values.pop(name)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    weights = {name: mx.array(np.ascontiguousarray(array, np.float32)) for name, array in values.items()}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()), strict=True)
    model.set_dtype(mx.float32)
    assert all(array.dtype == mx.float32 for _, array in tree_flatten(model.parameters()))
    return model


def make(case: Case, folder: Path) -> float:
    """Fills a folder and returns the logits' standard deviation."""
    rng = fixture.generator(case.name)
    tensors, values = {}, {}
    for name, shape in sorted(shapes(case.config).items()):
        is_bias = "bias" in name and "correction" not in name
        key = name + ".weight" if name.endswith(("gate_up_proj", "experts.down_proj")) else name
        random = random_weight(rng, "x.bias" if is_bias else key, shape, case.config).astype(np.float32)
        stored, values[name] = store(case, name, random)
        tensors |= stored
    config = {**case.config, "torch_dtype": "bfloat16", case.key: case.quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    fixture.write_safetensors(folder / "model.safetensors", tensors)
    model = reference(case, values)
    return fixture.write_golden(
        case.name, case.config["vocab_size"], lambda tokens: np.array(model(mx.array(tokens)[None])[0]), folder
    )


if __name__ == "__main__":
    fixture.main(__doc__, {case.name: (case.name, partial(make, case)) for case in CASES})
