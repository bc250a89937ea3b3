#!/usr/bin/env python3
"""Makes values/: matrices of random bytes in the formats of Hugging Face folders, and what the reference libraries make of them.

    PYTHONPATH=…/gptqmodel-7.7.0 python3 tests/golden/formats/make_values.py [--out DIR] [NAME...]

Needs PyTorch, transformers, compressed-tensors and GPTQModel (its source as PyPI has it: nothing of it is compiled). Every random
number comes from a generator seeded with the case's name. README.md says what is compared.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import fixture

CASES = Path(__file__).parent / "cases"
OUT = "model.layers.0.self_attn.o_proj"
TYPES = {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.float16: "F16",
         torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}  # fmt: skip


def words(rng, *shape) -> torch.Tensor:
    """Random 32-bit words: every level in every place."""
    return torch.from_numpy(rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.int32))


def scales(rng, shape, exponents, dtype) -> torch.Tensor:
    """Random scales of very different sizes, one of them 0."""
    numbers = np.exp2(rng.uniform(*exponents, shape)) * rng.uniform(1, 2, shape)
    numbers.flat[-1] = 0
    return torch.from_numpy(numbers.astype(np.float32)).to(dtype)


def config_of(name: str) -> dict:
    return json.loads((CASES / name / "config.json").read_text())


def integers(config: dict, rng) -> tuple:
    """compressed-tensors' own reading of `weight_packed`, with scales in f32, so that it rounds once."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    quantization = QuantizationConfig.model_validate(config["quantization_config"])
    (scheme,) = quantization.config_groups.values()
    weights, (rows, cols) = scheme.weights, (64, 128)
    groups = cols // (weights.group_size or cols)
    stored = {
        "weight_packed": words(rng, rows, cols * weights.num_bits // 32),
        "weight_scale": scales(rng, (rows, groups), (-40, 20), torch.bfloat16),
        "weight_shape": torch.tensor([rows, cols]),
    }
    if not weights.symmetric:
        stored["weight_zero_point"] = words(rng, rows * weights.num_bits // 32, groups)
    compressor = BaseCompressor.get_value_from_registry(quantization.format)
    read = compressor.decompress({**stored, "weight_scale": stored["weight_scale"].float()}, scheme)
    return {f"{OUT}.{name}": tensor for name, tensor in stored.items()}, {"out": read["weight"]}


def packed_mxfp4(config: dict, rng) -> tuple:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    quantization = QuantizationConfig.model_validate(config["quantization_config"])
    (scheme,) = quantization.config_groups.values()
    stored = {
        "weight_packed": torch.from_numpy(rng.integers(0, 256, (64, 64), dtype=np.uint8)),
        "weight_scale": torch.from_numpy(rng.integers(4, 250, (64, 4), dtype=np.uint8)),
    }
    compressor = BaseCompressor.get_value_from_registry(quantization.format)
    read = compressor.decompress(stored, scheme)
    # Its numbers are bf16, which holds them exactly.
    return {f"{OUT}.{name}": tensor for name, tensor in stored.items()}, {"out": read["weight"]}


def float_channels(config: dict, rng) -> tuple:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    quantization = QuantizationConfig.model_validate(config["quantization_config"])
    (scheme,) = quantization.config_groups.values()
    stored = {"weight": e4m3(rng, 64, 128), "weight_scale": scales(rng, (64, 1), (-40, 20), torch.bfloat16)}
    compressor = BaseCompressor.get_value_from_registry(quantization.format)
    read = compressor.decompress({**stored, "weight_scale": stored["weight_scale"].float()}, scheme)
    return {f"{OUT}.{name}": tensor for name, tensor in stored.items()}, {"out": read["weight"]}


def gptq(config: dict, rng) -> tuple:
    """GPTQModel's `TorchLinear`, after its conversion of the format's first version."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    settings, (rows, cols) = config["quantization_config"], (64, 128)
    bits, group = settings["bits"], settings["group_size"]
    groups = 1 if group == -1 else cols // group
    is_first = settings.get("checkpoint_format", "gptq") == "gptq"
    zeros = words(rng, groups, rows * bits // 32)
    if is_first:
        # GPTQModel adds 1 to whole words: a largest number would carry into its neighbour.
        # AutoGPTQ wraps it.
        top = 2**bits - 1
        numbers = zeros.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & top
        numbers = np.minimum(numbers, top - 1) << np.arange(0, 32, bits, dtype=np.uint32)
        zeros = torch.from_numpy(numbers.sum(-1, dtype=np.uint32).view(np.int32))
    stored = {
        "qweight": words(rng, cols * bits // 32, rows),
        "qzeros": zeros,
        "scales": scales(rng, (groups, rows), (-20, 4), torch.float16),
        "g_idx": torch.arange(cols, dtype=torch.int32) // (cols if group == -1 else group),
    }
    module = TorchLinear(bits=bits, group_size=group, sym=settings["sym"], desc_act=False, in_features=cols, out_features=rows,
                         bias=False, register_buffers=True)  # fmt: skip
    for name, tensor in stored.items():
        setattr(module, name, tensor.clone().float() if name == "scales" else tensor.clone())
    if is_first:
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    module.eval()
    module.post_init()
    return {f"{OUT}.{name}": tensor for name, tensor in stored.items()}, {"out": module.dequantize_weight().T}


def awq(config: dict, rng) -> tuple:
    """AutoAWQ's `dequantize_gemm`, which GPTQModel has copied."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    settings, (rows, cols) = config["quantization_config"], (64, 128)
    group = settings["group_size"]
    stored = {
        "qweight": words(rng, cols, rows // 8),
        "qzeros": words(rng, cols // group, rows // 8),
        "scales": scales(rng, (cols // group, rows), (-20, 4), torch.float16),
    }
    read = dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, group)
    return {f"{OUT}.{name}": tensor for name, tensor in stored.items()}, {"out": read.T}


def e4m3(rng, rows: int, cols: int) -> torch.Tensor:
    """Random codes, all but NaN."""
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    codes[codes & 127 == 127] = 0
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def fp8(config: dict, rng) -> tuple:
    """transformers' dequantization of blocks, or of a matrix with one scale."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    block = config["quantization_config"]["weight_block_size"]
    rows, cols = (160, 256) if block else (64, 128)
    weight = e4m3(rng, rows, cols)
    shape = (-(-rows // block[0]), -(-cols // block[1])) if block else ()
    scale = torch.from_numpy(np.asarray(np.exp2(rng.uniform(-20, 10, shape)), np.float32))
    stored = {"weight": weight, "weight_scale_inv": scale}
    return {f"{OUT}.{name}": tensor for name, tensor in stored.items()}, {"out": _dequantize_fp8_weight(weight, scale, block, torch.float32)}


def exponents(config: dict, rng) -> tuple:
    """DeepSeek V4's FP8 with powers of two, and its 4-bit experts, by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    block = config["quantization_config"]["weight_block_size"]
    read = partial(Fp8Dequantize(None)._dequantize_one, output_dtype=torch.float32)

    def powers(*shape):
        return torch.from_numpy(rng.integers(90, 150, shape, dtype=np.uint8)).view(torch.float8_e8m0fnu)

    weight, scale = e4m3(rng, 64, 96), powers(64 // block[0], 96 // block[1])
    expert = torch.from_numpy(rng.integers(-128, 128, (64, 64), dtype=np.int8))
    of_expert = powers(64, 4)
    stored = {"attn.wo_b.weight": weight, "attn.wo_b.scale": scale, "ffn.experts.0.w1.weight": expert, "ffn.experts.0.w1.scale": of_expert}
    # What precedes `layers` is known by the embedding's name.
    tensors = {"embed.weight": torch.zeros(1, 1), **{f"layers.0.{name}": tensor for name, tensor in stored.items()}}
    return tensors, {"out": read(weight, scale), "gate": read(expert, of_expert)}


def mxfp4_blocks(_, rng) -> tuple:
    """gpt-oss's stacks, whose gate and up rows take turns, by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, read = {}, {}
    for name in ("gate_up_proj", "down_proj"):
        blocks = torch.from_numpy(rng.integers(0, 256, (2, 32, 4, 16), dtype=np.uint8))
        powers = torch.from_numpy(rng.integers(4, 250, (2, 32, 4), dtype=np.uint8))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": powers}
        read[name] = convert_moe_packed_tensors(blocks, powers, dtype=torch.float32).transpose(1, 2)
    expected = {"gate": read["gate_up_proj"][:, ::2], "up": read["gate_up_proj"][:, 1::2], "down": read["down_proj"]}
    return {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in stored.items()}, expected


MAKERS = {
    "deepseek_v3-fp8": fp8,
    "deepseek_v4-fp8": exponents,
    "gpt_oss-mxfp4_blocks": mxfp4_blocks,
    "llama-fp8-tensor": fp8,
    "llama-gptq-8bit-row": gptq,
    "llama-gptq_v2-g64": gptq,
    "llama-int4-g32": integers,
    "llama-int4-g32-zeros": integers,
    "llama-int8-channel": integers,
    "llama-mxfp4-packed": packed_mxfp4,
    "qwen2-gptq-g32": gptq,
    "qwen3-awq-g32": awq,
    "qwen3-fp8-channel": float_channels,
}


def config(name: str) -> dict:
    """The golden folder's config, or a Llama with the quantization of Kimi K2 Thinking's or Kimi K3's experts."""
    if name == "llama-int4-g32":
        return {**config_of("llama-int4-g32-zeros"), "quantization_config": config_of("kimi_k2-int4-g32")["quantization_config"]}
    if name == "llama-mxfp4-packed":
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
        group = {"targets": ["Linear"], "weights": weights}
        quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        return {**config_of("llama-int4-g32-zeros"), "quantization_config": quantization}
    return config_of(name)


def stored(tensor: torch.Tensor) -> tuple:
    tensor = tensor.contiguous()
    return TYPES[tensor.dtype], tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def make(name: str, folder: Path) -> float:
    """Fills a folder and returns the values' standard deviation."""
    of = config(name)
    tensors, expected = MAKERS[name](of, fixture.generator(name))
    tensors |= {f"expected.{role}": values.float().reshape(-1, *values.shape[-2:]) for role, values in expected.items()}
    (folder / "config.json").write_text(json.dumps(of, indent=2) + "\n")
    fixture.write_safetensors(folder / "model.safetensors", {key: stored(tensor) for key, tensor in tensors.items()})
    return float(np.mean([values.float().std() for values in expected.values()]))


if __name__ == "__main__":
    sys.argv[1:1] = [] if "--out" in sys.argv else ["--out", str(Path(__file__).parent / "values")]
    fixture.main(__doc__, {name: (name, partial(make, name)) for name in MAKERS})
