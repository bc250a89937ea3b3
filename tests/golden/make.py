#!/usr/bin/env python3
"""Makes the golden fixtures: model folders with random weights and the logits that MLX-LM computes for them in f32.

    python3 tests/golden/make.py [--out DIR] [NAME...]      (or `cargo xtask golden`, which installs the packages too)

Needs Python 3.10 or later and requirements.txt's packages. Every random number comes from a generator seeded with the
case's name, so each folder can be made alone. README.md says what is in the files.
"""

import json
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import _get_classes, load_model

import fixture
from cases import CASES, Case

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
SAFETENSORS_NAMES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.uint8: "U8",
}  # fmt: skip
# Spread of the logits from an untied head: about that of a trained model.
HEAD_GAIN = 2.5
# Tied embeddings: between that spread and a residual stream that is more than layer output.
TIED_GAIN = 5.0
# Times 1/sqrt(fan in): what `initializer_range` 0.02 is at a width of 1600. Output projections get
# 1/sqrt(2 * layers) of it, as GPT-2 does. Larger gains make the net chaotic: it amplifies every
# rounding, which a trained one does not.
LINEAR_GAIN = 0.8
# Routers decide: rounding seldom changes which experts are chosen.
ROUTER_GAIN = 2.0


def stored(array: mx.array) -> tuple:
    """Type, shape and bytes of an array."""
    raw = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return SAFETENSORS_NAMES[array.dtype], array.shape, np.array(raw).tobytes()


def write_arrays(path: Path, tensors: dict):
    fixture.write_safetensors(path, {name: stored(array) for name, array in tensors.items()})


def random_weight(rng, name: str, shape, config: dict, names: list) -> np.ndarray:
    """A weight about as large as in a trained model (gains above); norms near 1, biases off zero."""
    if "norm" in name:
        gain = 0.5 / config["num_hidden_layers"] if fixture.is_after_norm(name, names) or "routed_expert_norm" in name else 1.0
        # Gemma's and MiniMax M3's are less one here, too.
        kind = config["model_type"]
        less = 1.0 if ("gemma" in kind and "gemma4" not in kind) or "minimax_m3" in kind else 0.0
        return gain * np.exp(0.2 * rng.standard_normal(shape)) - less
    if name.endswith(("A_log", "dt_bias", "mixer.D", "mamba.D")):
        return rng.standard_normal(shape)
    if name.endswith(("_hc.base", "_hc.scale")):
        return 0.5 * rng.standard_normal(shape) + (1.0 if name.endswith("scale") else 0.0)
    if name.endswith("layer_scalar"):
        return np.full(shape, 0.75)
    if name.endswith("router.scale"):
        return np.sqrt(shape[0]) * np.exp(0.2 * rng.standard_normal(shape))
    if name.endswith("per_expert_scale"):
        return np.exp(0.4 * rng.standard_normal(shape))
    if "conv1d.weight" in name or name.endswith("conv.conv.weight"):
        return rng.standard_normal(shape) / np.sqrt(shape[1])
    if name.endswith(("sinks", "sink_bias", "e_score_correction_bias", "expert_bias")):
        return (1.0 if "sink" in name else 0.1) * rng.standard_normal(shape)
    if name.endswith(".bias"):
        return 0.3 * rng.standard_normal(shape)
    gain = LINEAR_GAIN
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight", "expert_up_proj.weight", "feed_forward.w2.weight", "o_b_proj.weight")):
        gain /= np.sqrt(2 * config["num_hidden_layers"])
        # What it reads is a product of three, whose rounding errors add up.
        gain /= 2 if name.endswith(".conv.out_proj.weight") else 1
    elif "lm_head" in name:
        gain = HEAD_GAIN
    elif "embed_tokens" in name or "embeddings" in name:
        gain = TIED_GAIN if config["tie_word_embeddings"] else np.sqrt(shape[-1])
    elif name.endswith(("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight", "mixer.gate.weight", "router.proj.weight", "feed_forward.gate.weight", "feed_forward.router.weight",
                        "mlp.gate.wg.weight")):
        gain = ROUTER_GAIN
    return gain / np.sqrt(shape[-1]) * rng.standard_normal(shape)


def write_model(case: Case, folder: Path):
    """Writes config.json and the weight files of one case."""
    rng = fixture.generator(case.name)
    model_class, args_class = _get_classes({**case.config, **case.reference})
    model = model_class(args_class.from_dict(json.loads(json.dumps({**case.config, **case.reference}))))
    dtype = DTYPES[case.dtype]
    text_config = case.config.get("text_config", case.config)
    fresh = []
    parameters = sorted(tree_flatten(model.parameters()))
    names = [name for name, _ in parameters]
    for name, old in parameters:
        fresh.append((name, mx.array(random_weight(rng, name, old.shape, text_config, names)).astype(dtype)))
    model.update(tree_unflatten(fresh))

    config = {**case.config, "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[case.dtype]}
    if q := case.quantization:
        nn.quantize(
            model,
            q.group_size,
            q.bits,
            mode=q.mode,
            class_predicate=lambda path, m: q.overrides.get(path, True) if hasattr(m, "to_quantized") else False,
        )
        config["quantization"] = {"group_size": q.group_size, "bits": q.bits, "mode": q.mode, **q.overrides}
        config["quantization_config"] = config["quantization"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    tensors = dict(tree_flatten(model.parameters()))
    if text_config["tie_word_embeddings"]:
        # MLX-LM's Gemma has a head until it reads a folder without.
        tensors = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    if case.published:
        tensors = dict(published(tensors, text_config))
    for name, shape in case.ignored.items():
        tensors[name] = mx.array(rng.standard_normal(shape)).astype(dtype)
    write_files(tensors, case.files, folder)


def published(tensors: dict, config: dict):
    """Names and forms of Kimi K3's published folder, which MLX-LM's `sanitize` undoes: a tensor for each expert, in MXFP4; queries, keys and
    values apart, `kv_b` whole."""
    experts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, tensor in tensors.items():
        if ".switch_mlp." in name:
            path, matrix = name.removesuffix(".weight").split(".mlp.switch_mlp.")
            for index in range(config["num_experts"]):
                packed, scales = mx.quantize(tensor[index], group_size=32, bits=4, mode="mxfp4")
                expert = f"{path}.block_sparse_moe.experts.{index}.{experts[matrix]}"
                yield f"{expert}.weight_packed", packed.view(mx.uint8)
                yield f"{expert}.weight_scale", scales
        elif "qkv_" in name:
            for part, rows in zip("qkv", mx.split(tensor, 3), strict=True):
                yield name.replace("qkv_conv.conv", f"{part}_conv1d").replace("qkv_proj", f"{part}_proj"), (
                    rows.moveaxis(1, 2) if "conv" in name else rows
                )
        elif name.endswith("embed_q.weight"):
            values = tensors[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([tensor.swapaxes(-1, -2), values], axis=1)
            yield name.replace("embed_q", "kv_b_proj"), both.reshape(-1, both.shape[-1])
        elif name.endswith("mlp.e_score_correction_bias"):
            yield name.replace("mlp.", "block_sparse_moe.gate."), tensor
        elif "unembed_out" not in name:
            is_sparse = any(part in name for part in (".mlp.gate.", ".mlp.shared_experts.", ".mlp.routed_expert"))
            yield name.replace(".mlp.", ".block_sparse_moe.") if is_sparse else name, tensor


def write_files(tensors: dict, files: int, folder: Path):
    """Writes one file, or several with an index as Hugging Face does for large models."""
    if files == 1:
        write_arrays(folder / "model.safetensors", tensors)
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        # Cut by count, not between layers: a module's weight and scales may be in different files.
        part = names[len(names) * i // files : len(names) * (i + 1) // files]
        write_arrays(folder / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def load_f32(case: Case, folder: Path):
    """Loads the folder with MLX-LM, then casts all floats (scales and biases too) to f32."""
    model, _ = load_model(folder, model_config=case.reference or None)
    model.set_dtype(mx.float32)
    return model


def forward(case: Case, model, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, [len, vocab], without a cache."""
    inputs = mx.array(tokens)[None]
    if case.windows is None:
        return np.array(model(inputs)[0])
    # MLX-LM's layers, but with each layer's own mask.
    h = model.model.embed_tokens(inputs)
    for layer, window in zip(model.layers, case.windows, strict=True):
        h = layer(h, create_attention_mask(h, window_size=window), None)
    h = model.model.norm(h)
    head = model.model.embed_tokens.as_linear if model.args.tie_word_embeddings else model.lm_head
    return np.array(head(h)[0])


def make(case: Case, folder: Path) -> float:
    """Fills a folder and returns the logits' standard deviation."""
    write_model(case, folder)
    model = load_f32(case, folder)
    vocab = case.config.get("text_config", case.config)["vocab_size"]
    return fixture.write_golden(case.name, vocab, lambda tokens: forward(case, model, tokens), folder)


if __name__ == "__main__":
    fixture.main(__doc__, {case.name: (case.name, partial(make, case)) for case in CASES})
