#!/usr/bin/env python3
"""Makes the golden folders of DeepSeek V4.1 with engram, under the names of published files: `deepseek_v41-engram` in bf16, and
`formats/cases/deepseek_v41-fp8` as published, with E4M3 projections and tables and 4-bit experts.

    SGLANG_ENGRAM=…/sglang/srt/layers/engram.py python3 tests/golden/make_engram.py [--out DIR] [NAME...]

MLX-LM computes the layers, in f32; it has no engram. What SGLang 0.5.23 has of it is taken from that file, which is in its wheel: the numbers of
tokens, the multipliers, the primes, the hashes and the gate, without what surrounds them there. Needs PyTorch, msgspec, tokenizers, MLX and MLX-LM.
Every random number comes from a generator seeded with the case's name.
"""

import ast
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import mlx.core as mx
import msgspec
import numpy as np
import tokenizers
import torch
from mlx_lm.models import deepseek_v41

import fixture
from cases import deepseek_v41 as config_of
from make import random_weight

VOCAB = 300
ENGRAM = {
    "engram_layer_ids": [0, 2], "engram_max_ngram_size": 3, "engram_vocab_size": 97, "engram_n_heads": 2, "engram_head_dim": 32,
    "engram_pad_token_id": 2,
}  # fmt: skip
# Two layers that compress, and one that reads what the last of them keeps.
SMALL = {
    "vocab_size": VOCAB, "num_hidden_layers": 3, "compress_ratios": [2, 1, 1], "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1, 2],
    "candidate_source_layer_id": 1, "hidden_size": 32, "o_lora_rank": 32, "n_routed_experts": 3, "bos_token_id": 297, "eos_token_id": 298,
}  # fmt: skip
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32], "expert_dtype": "fp4",
}  # fmt: skip
# MLX-LM's names, in its order, for the published ones.
NAMES = {
    "model.": "", "self_attn.": "attn.", "mlp.": "ffn.", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_", "sinks": "attn_sink", "q_a_proj": "wq_a", "indexer.q_b_proj": "indexer.wq_b", "q_b_proj": "wq_b", "o_a_proj": "wo_a",
    "o_b_proj": "wo_b", "q_a_norm": "q_norm", "compressor.kv_norm": "compressor.norm", "compressor.kv_proj": "compressor.wkv",
    "compressor.gate_proj": "compressor.wgate", "attn.kv_proj": "attn.wkv", "indexer.k_proj": "indexer.wk", "e_score_correction_bias": "bias",
    "shared_experts.gate_proj": "shared_experts.w1", "shared_experts.down_proj": "shared_experts.w2", "shared_experts.up_proj": "shared_experts.w3",
    "embed_tokens": "embed", "lm_head": "head",
}  # fmt: skip


def sglang() -> SimpleNamespace:
    """SGLang's functions, without the imports around them."""
    names = {
        "_MILLER_RABIN_WITNESSES", "_is_prime", "_find_next_prime", "build_compressed_token_map", "compute_hash_multipliers", "EngramLayout",
        "compute_engram_hash_ids", "engram_gate",
    }  # fmt: skip
    tree = ast.parse(Path(os.environ["SGLANG_ENGRAM"]).read_text())

    def is_wanted(node) -> bool:
        if isinstance(node, ast.Assign):
            return getattr(node.targets[0], "id", None) in names
        return isinstance(node, ast.ImportFrom) and node.module == "__future__" or getattr(node, "name", None) in names

    tree.body = [node for node in tree.body if is_wanted(node)]
    space = {"torch": torch, "np": np, "msgspec": msgspec, "Optional": Optional, "_cuda_kernels": lambda _: False, "__name__": "engram"}
    exec(compile(tree, "engram.py", "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def tokenizer() -> dict:
    """All bytes, some words that are alike without case, accents and compositions, and special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    words = ["the", " the", " The", "THE", "é", "É", "e\u0301", "ﬁ", "fi", "Fi", "  ", " \n", "\n\n", "ß", "ss", "ǆ", "dž", "½", "…", "...", "İ", "i̇"]
    spelled = ["".join(character[byte] for byte in word.encode()) for word in words]
    specials = ["<|begin|>", "<|end|>", "<|pad|>"]
    names = [character[byte] for byte in range(256)] + spelled
    names += [f"t{i}" for i in range(VOCAB - len(names) - len(specials))] + specials
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "added_tokens": [
            {"id": names.index(name), "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for name in specials
        ],
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False, "vocab": {name: i for i, name in enumerate(names)}, "merges": [],
        },
    }  # fmt: skip


class Engram:
    """The hashes of a model, and what its layers add to the streams."""

    def __init__(self, config: dict, text: str):
        self.of = sglang()
        backend = tokenizers.Tokenizer.from_str(text)
        library = type("Library", (), {"backend_tokenizer": backend, "__len__": lambda _: backend.get_vocab_size()})()
        numbers, self.count = self.of.build_compressed_token_map(library)
        self.numbers, self.pad = torch.tensor(numbers), numbers[config["engram_pad_token_id"]]
        config = SimpleNamespace(**{**config, "engram_num_embeddings": ()})
        self.layout = self.of.EngramLayout.from_config(config)
        layers = range(len(self.layout.layer_ids))
        self.rows = [self.layout.column_bounds(layer)[-1] for layer in layers]
        self.offsets = torch.tensor([self.layout.column_bounds(layer)[:-1] for layer in layers])
        self.multipliers = self.of.compute_hash_multipliers(self.layout.layer_ids, self.layout.max_ngram_size, self.count)

    def hashes(self, tokens: np.ndarray) -> torch.Tensor:
        """Rows of the tables, [tokens, layers, columns]."""
        positions, back = torch.arange(len(tokens))[:, None], torch.arange(self.layout.max_ngram_size)
        before = torch.tensor(tokens.astype(np.int64))[(positions - back).clamp_min(0)]
        primes = torch.tensor(self.layout.primes)
        return self.of.compute_engram_hash_ids(before, positions < back, self.pad, self.numbers, self.multipliers, primes, self.offsets)

    def add(self, streams: np.ndarray, values: dict, layer: int, hashes: torch.Tensor, eps: float) -> np.ndarray:
        """`streams` is [tokens, streams, hidden]."""
        path = f"layers.{layer}.engram"
        rows = values[f"{path}.embed.weight"][hashes[:, self.layout.layer_ids.index(layer)]].flatten(-2)
        keys = rows @ values[f"{path}.wkv.weight"].T
        weights = [values[f"{path}.{name}_weight"] for name in "qk"]
        return self.of.engram_gate(torch.from_numpy(streams), keys, *weights, eps, 1e-6).numpy()


def forward(model, engram: Engram, values: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits, [tokens, vocabulary]: MLX-LM's `TextModel`, with engram before its layers."""
    text, args, hashes = model.model, model.args, engram.hashes(tokens)
    h = text.embed_tokens(mx.array(tokens)[None])
    window = deepseek_v41._window_indices(previous=0, length=len(tokens), window=args.sliding_window)[None]
    streams = mx.repeat(h[:, :, None, :], args.hc_mult, axis=2)
    weights = mx.zeros((1, len(tokens), args.hc_mult))
    weights[..., 0] = 1.0
    shared = {}
    for number, (layer, cache) in enumerate(zip(text.layers, text.make_cache(), strict=True)):
        if number in engram.layout.layer_ids:
            streams = mx.array(engram.add(np.array(streams[0]), values, number, hashes, args.rms_norm_eps))[None]
        streams, weights = layer(streams, weights, start_pos=0, window_idx=window, cache=cache, shared=shared)
    return np.array(model.lm_head(text.norm(deepseek_v41._collapse(streams, weights)))[0])


def published(name: str, value: np.ndarray):
    """Published names of a tensor of MLX-LM's, and their values."""
    if ".switch_mlp." in name:
        matrix = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[name.split(".")[-2]]
        layer = name.split(".")[2]
        return [(f"layers.{layer}.ffn.experts.{index}.{matrix}.weight", one) for index, one in enumerate(value)]
    for theirs, published in NAMES.items():
        name = name.replace(theirs, published)
    return [(name, value.reshape(-1, value.shape[-1]) if ".wo_a." in name else value)]


def stored(name: str, value: torch.Tensor, quantized: bool):
    """Tensors of a value, and the value that they stand for."""
    from formats.make_deepseek4 import fp4, fp8, raw

    module = name.removesuffix(".weight")
    if quantized and ".ffn.experts." in name:
        codes, scales, exact = fp4(value)
        return {name: raw(codes, "I8"), f"{module}.scale": raw(scales, "F8_E8M0")}, exact
    if quantized and name.endswith("engram.embed.weight"):
        # Each row has scales of its own.
        scale = 2.0 ** torch.ceil(torch.log2(value.view(len(value), -1, 32).abs().amax(-1).clamp(min=1e-4) / 448.0))
        codes = (value.view(len(value), -1, 32) / scale[..., None]).to(torch.float8_e4m3fn)
        exact = (codes.float() * scale[..., None]).view(value.shape)
        exponents = (torch.log2(scale) + 127).to(torch.uint8)
        return {name: raw(codes.view(value.shape), "F8_E4M3"), f"{module}.scale": raw(exponents, "F8_E8M0")}, exact
    if quantized and module.endswith(("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3", "engram.wkv")):
        codes, scales, exact = fp8(value)
        return {name: raw(codes, "F8_E4M3"), f"{module}.scale": raw(scales, "F8_E8M0")}, exact
    exact = value.to(torch.bfloat16)
    return {name: raw(exact, "BF16")}, exact.float()


def make(name: str, quantized: bool, folder: Path) -> float:
    rng = fixture.generator(name)
    text = json.dumps(tokenizer(), ensure_ascii=False)
    config = {**config_of(**SMALL, **ENGRAM), "engram_num_embeddings": [], "torch_dtype": "bfloat16"}
    engram = Engram(config, text)
    config.update(engram_num_embeddings=engram.rows, engram_compressed_vocab_size=engram.count)
    model = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict({**config, "engram_layer_ids": ()}))
    from mlx.utils import tree_flatten

    tensors, values = {}, {}
    parameters = sorted(tree_flatten(model.parameters()))
    names = [key for key, _ in parameters]
    fresh = [(key, random_weight(rng, key, old.shape, config, names)) for key, old in parameters]
    streams, hidden, columns = config["hc_mult"], config["hidden_size"], config["engram_n_heads"] * (config["engram_max_ngram_size"] - 1)
    width = config["engram_head_dim"]
    for layer, rows in zip(config["engram_layer_ids"], engram.rows, strict=True):
        path = f"model.layers.{layer}.engram"
        fresh.append((f"{path}.embed.weight", rng.standard_normal((rows, width))))
        fresh.append((f"{path}.wkv.weight", rng.standard_normal(((streams + 1) * hidden, columns * width)) / np.sqrt(columns * width)))
        fresh += [(f"{path}.{one}_weight", np.exp(0.2 * rng.standard_normal((streams, hidden)))) for one in "qk"]
    for key, value in fresh:
        for key, value in published(key, value):
            parts, values[key] = stored(key, torch.from_numpy(np.ascontiguousarray(value)).float(), quantized)
            tensors.update(parts)
    model.load_weights(list(model.sanitize({key: mx.array(value.numpy()) for key, value in values.items()}).items()))
    if quantized:
        config["quantization_config"] = FP8
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "tokenizer.json").write_text(text + "\n")
    fixture.write_safetensors(folder / "model.safetensors", tensors)
    return fixture.write_golden(name, VOCAB, partial(forward, model, engram, values), folder)


if __name__ == "__main__":
    formats = Path("..") / "formats" / "cases"
    fixture.main(__doc__, {
        "deepseek_v41-engram": ("deepseek_v41-engram", partial(make, "deepseek_v41-engram", False)),
        "deepseek_v41-fp8": (str(formats / "deepseek_v41-fp8"), partial(make, "deepseek_v41-fp8", True)),
    })
