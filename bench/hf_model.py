#!/usr/bin/env python3
"""Writes folders of Llama 8B's shape in quantized Hugging Face formats, with random weights.

    hf_model.py OUT FORMAT... [--layers 8]

FORMAT is one of fp8, int4, awq, gptq, nvfp4, mxfp4. A folder of 8 layers and 32,000 tokens has 1.4 to 2.3 GB,
0.52 of it the embedding and the head in bf16. The tokenizer is Llama 3's test fixture.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

HIDDEN, CHANNELS, KV, VOCABULARY = 4096, 14336, 1024, 32000
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (CHANNELS, HIDDEN),
    "mlp.up_proj": (CHANNELS, HIDDEN),
    "mlp.down_proj": (HIDDEN, CHANNELS),
}
TOKENIZER = Path(__file__).parent.parent / "crates/model/tests/fixtures/text/llama3"
RANDOM = np.random.default_rng(1)


def compressed(layout: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "strategy": "group", "group_size": 32, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


# What config.json says of each format.
CONFIGS = {
    "fp8": {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                    "weight_block_size": [128, 128]}},
    "int4": {"quantization_config": compressed("pack-quantized", num_bits=4, type="int", symmetric=True)},
    "mxfp4": {"quantization_config": compressed("mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True,
                                                scale_dtype="torch.uint8")},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
                                    "zero_point": True}},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False,
                                     "sym": True}},
    "nvfp4": {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4", "model.embed_tokens": False,
                               "lm_head": False}},
}


def words(dtype: str, *shape: int) -> tuple:
    return dtype, shape, RANDOM.integers(0, 2**32, shape, dtype=np.uint32).tobytes()


def small_bytes(low: int, high: int, *shape: int) -> tuple:
    return "U8", shape, RANDOM.integers(low, high, shape, dtype=np.uint8).tobytes()


def f16(size: float, *shape: int) -> tuple:
    return "F16", shape, (size * (0.5 + RANDOM.random(shape))).astype(np.float16).tobytes()


def bf16(size: float, *shape: int) -> tuple:
    numbers = (size * (0.5 + RANDOM.random(shape))).astype(np.float32)
    return "BF16", shape, (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def matrix(form: str, name: str, rows: int, cols: int) -> dict:
    """The tensors of one matrix: type, shape, bytes."""
    if form == "fp8":
        codes = RANDOM.integers(0, 256, (rows, cols), dtype=np.uint8)
        # No NaN.
        codes[codes & 0x7F == 0x7F] = 0x38
        blocks = (rows // 128, cols // 128)
        scales = (1e-4 * (0.5 + RANDOM.random(blocks))).astype(np.float32).tobytes()
        return {f"{name}.weight": ("F8_E4M3", (rows, cols), codes.tobytes()),
                f"{name}.weight_scale_inv": ("F32", blocks, scales)}
    if form == "int4":
        return {f"{name}.weight_packed": words("I32", rows, cols // 8),
                f"{name}.weight_scale": bf16(2e-3, rows, cols // 32),
                f"{name}.weight_shape": ("I64", (2,), np.array([rows, cols], np.int64).tobytes())}
    if form == "mxfp4":
        return {f"{name}.weight_packed": small_bytes(0, 256, rows, cols // 2),
                f"{name}.weight_scale": small_bytes(116, 120, rows, cols // 32)}
    if form == "nvfp4":
        return {f"{name}.weight": words("U32", rows, cols // 8),
                f"{name}.scales": small_bytes(0x08, 0x18, rows, cols // 16)}
    scales = {f"{name}.scales": f16(2e-3, cols // 128, rows)}
    if form == "awq":
        return {f"{name}.qweight": words("I32", cols, rows // 8),
                f"{name}.qzeros": words("I32", cols // 128, rows // 8)} | scales
    zeros = np.full((cols // 128, rows // 8), 0x77777777, np.uint32)
    return {f"{name}.qweight": words("I32", cols // 8, rows),
            f"{name}.qzeros": ("I32", zeros.shape, zeros.tobytes()),
            f"{name}.g_idx": ("I32", (cols,), (np.arange(cols) // 128).astype(np.int32).tobytes())} | scales


def write(form: str, folder: Path, layers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": bf16(1.0, VOCABULARY, HIDDEN),
        "model.norm.weight": bf16(1.0, HIDDEN),
        "lm_head.weight": bf16(0.02, VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = bf16(1.0, HIDDEN)
        for name, (rows, cols) in MATRICES.items():
            tensors |= matrix(form, f"model.layers.{layer}.{name}", rows, cols)
    at, header = 0, {}
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": CHANNELS, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": KV // 128, "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config | CONFIGS[form], indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("formats", nargs="+", choices=CONFIGS)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    for form in arguments.formats:
        write(form, arguments.out / form, arguments.layers)


if __name__ == "__main__":
    main()
