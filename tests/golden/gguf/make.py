#!/usr/bin/env python3
"""Makes the GGUF fixtures: blocks of every type with the `gguf` package's values, and small models with llama.cpp's logits.

    python3 tests/golden/gguf/make.py [--llama-cpp DIR] [--out DIR]

DIR is what bench/llama_cpp.sh leaves: llama.cpp's source and a build with static libraries (default: the newest one below
~/.cache/thunderhead/llama.cpp). Needs g++, and gguf 0.19.0, numpy 2.4.6 and safetensors 0.8.0. README.md says what is in
the files. Every random number comes from a seeded generator.
"""

import argparse
import json
import subprocess
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from safetensors.numpy import save_file

TEXT = Path(__file__).parents[3] / "crates/model/tests/fixtures/text"
TYPES = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS, T.MXFP4]
FLOATS = [T.F32, T.F16, T.BF16]
PROMPT_LENGTHS = (1, 40, 70)
LAST_PROMPT_POSITIONS = (0, 15, 16, 31, 32, 63, 64, 69)
# Where a type's f16 numbers are, and their sizes if weights have a step of 1: groups' scales of 6
# bits are 32 on average, those of 4 bits 8, signed bytes 64. Offsets put the middle level at zero.
NUMBERS = {
    T.Q4_0: [(0, 1)], T.Q4_1: [(0, 1), (2, -7.5)], T.Q5_0: [(0, 1)], T.Q5_1: [(0, 1), (2, -15.5)], T.Q8_0: [(0, 1)],
    T.Q2_K: [(80, 1 / 8), (82, 1.5 / 8)], T.Q3_K: [(108, 1 / 16)], T.Q4_K: [(0, 1 / 32), (2, 7.5 / 32)],
    T.Q5_K: [(0, 1 / 32), (2, 15.5 / 32)], T.Q6_K: [(208, 1 / 64)], T.IQ4_NL: [(0, 1)], T.IQ4_XS: [(0, 1 / 16)],
    T.MXFP4: [],
}  # fmt: skip
# Standard deviation of random levels.
SPREAD = {
    T.Q4_0: 4.6, T.Q4_1: 4.6, T.Q5_0: 9.2, T.Q5_1: 9.2, T.Q8_0: 74, T.Q2_K: 1.4, T.Q3_K: 2.5, T.Q4_K: 5, T.Q5_K: 10,
    T.Q6_K: 22, T.IQ4_NL: 70, T.IQ4_XS: 80, T.MXFP4: 3,
}  # fmt: skip


def random_blocks(rng, rows: int, columns: int, kind: T, deviation: float) -> np.ndarray:
    """Blocks of random bytes whose weights have about this standard deviation: u8 [rows, bytes]."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    step = deviation / SPREAD[kind]
    if kind in (T.Q4_K, T.Q5_K):
        # A group's offset is as large as its scale, so that its middle is at zero.
        data[:, 8:12], data[:, 12:16] = data[:, 4:8], (data[:, 12:16] & 15) * 17
    if kind == T.Q2_K:
        data[:, :16] = (data[:, :16] & 15) * 17
    for at, factor in NUMBERS[kind]:
        numbers = step * factor * rng.uniform(0.8, 1.2, len(data))
        if factor == -7.5 or factor == -15.5:
            numbers = data[:, :2].copy().view(np.float16)[:, 0].astype(np.float32) * factor
        data[:, at : at + 2] = numbers.astype(np.float16)[:, None].view(np.uint8)
    if kind == T.MXFP4:
        data[:, 0] = 127 + round(np.log2(step)) + rng.integers(-1, 2, len(data))
    return data.reshape(rows, -1)


def hard_blocks(rng, kind: T) -> np.ndarray:
    """Random blocks, then blocks of zeros and of ones, and blocks whose f16 numbers are negative, tiny, large or zero."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = [random_blocks(rng, 1, 8 * block, kind, 1.0).reshape(-1, size)]
    for fill in (0, 255):
        data.append(np.full((1, size), fill, np.uint8))
        for at, _ in NUMBERS[kind]:
            data[-1][:, at : at + 2] = np.array([0.25], np.float16).view(np.uint8)
    for number in (-0.5, 6e-8, 1000.0, 0.0):
        blocks = random_blocks(rng, 1, block, kind, 1.0).reshape(-1, size)
        for at, _ in NUMBERS[kind]:
            blocks[:, at : at + 2] = np.array([number], np.float16).view(np.uint8)
        data.append(blocks)
    if kind == T.MXFP4:
        data[1][0, 0], data[2][0, 0] = 0, 254
    return np.concatenate(data)


def write_blocks(path: Path):
    tensors = {}
    for kind in TYPES:
        rng = np.random.default_rng(zlib.crc32(kind.name.encode()))
        data = hard_blocks(rng, kind)
        tensors[f"blocks.{kind.name}"] = data
        tensors[f"values.{kind.name}"] = gguf.dequantize(data, kind).reshape(len(data), -1).astype(np.float32)
    save_file(tensors, path)


@dataclass(frozen=True)
class Case:
    """One model. `types` gives the type of a matrix by the end of its name; the first that fits is used."""

    name: str
    architecture: str
    hidden: int
    channels: int
    heads: int
    kv_heads: int
    width: int
    types: dict
    # A folder of crates/model/tests/fixtures/text, whose tokenizer becomes the file's.
    text: str
    layers: int = 2
    tied: bool = False
    biases: bool = False
    qk_norm: bool = False
    rope_divisors: bool = False
    parts: int = 1
    values: dict = field(default_factory=dict)
    experts: int = 0
    # Channels of a routed expert and of the shared ones together.
    expert_channels: int = 0
    shared_channels: int = 0
    # Layers with a plain MLP before those with experts.
    dense_layers: int = 0
    # Ranks and widths of latent attention: queries, keys and values, plain, rotated, value.
    latent: tuple = ()
    # kv_b in one tensor, as files before 2025 have it.
    whole_kv_b: bool = False
    # The router has a correction of the choice.
    corrected: bool = False
    # Name of the norm before the feed-forward.
    ffn_norm: str = "ffn_norm"


Q4_K_M = {"attn_v": T.Q6_K, "ffn_down": T.Q6_K, "output": T.Q6_K, "": T.Q4_K}
YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
}  # fmt: skip
LATENT = {
    "expert_used_count": 2, "expert_feed_forward_length": 96, "expert_shared_count": 1, "leading_dense_block_count": 1,
    "attention.q_lora_rank": 64, "attention.kv_lora_rank": 64, "rope.dimension_count": 16,
}  # fmt: skip
CASES = [
    Case("llama-f16", "llama", 64, 96, 4, 2, 16, {"": T.F16}, "llama3", rope_divisors=True),
    Case("llama-q4_k_m", "llama", 256, 256, 4, 2, 64, Q4_K_M, "llama3"),
    Case("llama-bf16-biases", "llama", 64, 64, 6, 3, 32, {"": T.BF16}, "mistral", biases=True, tied=True, values=YARN),
    Case("llama-iq4", "llama", 256, 256, 4, 4, 32,
         {"attn_v": T.IQ4_XS, "ffn": T.IQ4_NL, "attn_output": T.MXFP4, "": T.IQ4_XS}, "mistral"),
    Case("mistral3-q8_0", "mistral3", 64, 96, 6, 2, 32, {"": T.Q8_0}, "mistral",
         values={**YARN, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
                 "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5}),
    Case("qwen2-q5-q4_1", "qwen2", 64, 160, 2, 1, 32, {"ffn_down": T.Q5_1, "ffn": T.Q5_0, "": T.Q4_1}, "qwen", biases=True),
    Case("qwen3-q4_0", "qwen3", 128, 192, 10, 5, 32, {"ffn_down": T.Q8_0, "": T.Q4_0}, "qwen", qk_norm=True, tied=True),
    Case("qwen3-q2_k-q3_k", "qwen3", 256, 256, 4, 2, 64,
         {"attn_v": T.Q5_K, "ffn_down": T.Q3_K, "token_embd": T.Q5_K, "": T.Q2_K}, "qwen", qk_norm=True, tied=True, parts=2),
    Case("seed_oss-f16", "seed_oss", 64, 96, 6, 3, 32, {"": T.F16}, "qwen", biases=True, ffn_norm="post_attention_norm"),
    Case("ernie4_5-bf16", "ernie4_5", 64, 96, 4, 2, 32, {"": T.BF16}, "mistral", tied=True),
    # The last of four layers does not rotate.
    Case("smollm3-f16", "smollm3", 64, 64, 4, 2, 16, {"": T.F16}, "llama3", layers=4, tied=True),
    Case("mixtral-q5_0", "llama", 64, 96, 6, 3, 32, {"down": T.Q5_1, "": T.Q5_0}, "mistral", experts=5, expert_channels=96,
         values={"expert_used_count": 2}),
    Case("qwen2moe-q8_0", "qwen2moe", 64, 96, 4, 2, 16, {"": T.Q8_0}, "qwen", biases=True, experts=6, expert_channels=96,
         shared_channels=160, values={"expert_used_count": 2, "expert_feed_forward_length": 96,
                                      "expert_shared_feed_forward_length": 160}),
    Case("qwen3moe-q4_0", "qwen3moe", 64, 96, 6, 3, 32, {"down": T.Q4_1, "": T.Q4_0}, "qwen", qk_norm=True, experts=6,
         expert_channels=160, values={"expert_used_count": 3, "expert_feed_forward_length": 160}),
    # One layer after those of the model, which predicts further tokens.
    Case("glm4moe-q8_0", "glm4moe", 64, 96, 6, 3, 32, {"": T.Q8_0}, "llama3", biases=True, qk_norm=True, experts=6,
         expert_channels=64, shared_channels=64, dense_layers=1, corrected=True, ffn_norm="post_attention_norm",
         values={"expert_used_count": 2, "expert_feed_forward_length": 64, "expert_shared_count": 1, "expert_gating_func": 2,
                 "expert_weights_scale": 2.5, "expert_weights_norm": True, "leading_dense_block_count": 1,
                 "rope.dimension_count": 16}),
    Case("gpt-oss-mxfp4", "gpt-oss", 64, 64, 4, 2, 32, {"_exps": T.MXFP4, "": T.Q8_0}, "qwen", biases=True, experts=5,
         expert_channels=64, ffn_norm="post_attention_norm",
         values={"expert_used_count": 2, "expert_feed_forward_length": 64, "attention.sliding_window": 16}),
    Case("deepseek2-v3", "deepseek2", 64, 96, 4, 1, 48, {"attn_k_b": T.Q8_0, "": T.Q5_0}, "llama3", experts=6,
         expert_channels=96, shared_channels=96, dense_layers=1, latent=(64, 64, 32, 16, 32), corrected=True,
         values={**LATENT, **YARN, "rope.scaling.yarn_log_multiplier": 0.09, "expert_gating_func": 2,
                 "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_group_count": 3,
                 "expert_group_used_count": 2}),
    Case("deepseek2-whole_kv_b", "deepseek2", 64, 96, 4, 4, 48, {"": T.F16}, "llama3", experts=5,
         expert_channels=96, shared_channels=192, latent=(64, 64, 32, 16, 32), whole_kv_b=True,
         values={**LATENT, "leading_dense_block_count": 0, "expert_shared_count": 2}),
]  # fmt: skip


def tokenizer_values(folder: Path) -> list:
    """A tokenizer.json as llama.cpp's conversion writes it: (kind of value, key, value)."""
    file = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ids = dict(file["model"]["vocab"])
    added = {token["content"]: token for token in file["added_tokens"]}
    ids.update({content: token["id"] for content, token in added.items()})
    tokens = sorted(ids, key=ids.get)
    byte_level = file["decoder"]["type"] == "ByteLevel"

    def kind(token):
        if token == "<unk>":
            return gguf.TokenType.UNKNOWN
        if token in added:
            return gguf.TokenType.CONTROL if added[token]["special"] else gguf.TokenType.USER_DEFINED
        if not byte_level and token.startswith("<0x"):
            return gguf.TokenType.BYTE
        return gguf.TokenType.NORMAL

    values = [
        ("string", "tokenizer.ggml.model", "gpt2" if byte_level else "llama"),
        ("array", "tokenizer.ggml.tokens", tokens),
        ("array", "tokenizer.ggml.token_type", [int(kind(token)) for token in tokens]),
    ]
    if byte_level:
        pre = {"llama3": "llama-bpe", "qwen": "qwen2"}[folder.name]
        values.append(("string", "tokenizer.ggml.pre", pre))
        merges = [m if isinstance(m, str) else " ".join(m) for m in file["model"]["merges"]]
        values.append(("array", "tokenizer.ggml.merges", merges))
    else:
        # Tokens are in the order in which they were learned.
        values.append(("array", "tokenizer.ggml.scores", [-float(id) for id in range(len(tokens))]))
        values.append(("bool", "tokenizer.ggml.add_space_prefix", True))
    for name in ("bos", "eos"):
        token = config[f"{name}_token"]
        token = token["content"] if isinstance(token, dict) else token
        if token is not None:
            values.append(("uint32", f"tokenizer.ggml.{name}_token_id", ids[token]))
    values.append(("bool", "tokenizer.ggml.add_bos_token", file["post_processor"]["type"] != "ByteLevel"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    values.append(("string", "tokenizer.chat_template", template))
    return values


def type_of(case: Case, name: str) -> T:
    return next(kind for part, kind in case.types.items() if part in name)


def tensors(case: Case, vocab: int) -> dict:
    """All tensors: name to (type, stored array)."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    found = {}

    def matrix(name, rows, columns, gain):
        kind, deviation = type_of(case, name), gain / np.sqrt(columns)
        if kind in FLOATS:
            values = (deviation * rng.standard_normal((rows, columns))).astype(np.float32)
            data = gguf.quantize(values, kind)
        else:
            data = random_blocks(rng, rows, columns, kind, deviation)
        found[f"{name}.weight"] = (kind, data)

    def vector(name, values):
        found[name] = (T.F32, values.astype(np.float32))

    def norm(name, size):
        vector(f"{name}.weight", np.exp(0.2 * rng.standard_normal(size)))

    def bias(name, size):
        if case.biases:
            vector(f"{name}.bias", 0.3 * rng.standard_normal(size))

    # As tests/golden/make.py.
    matrix("token_embd", vocab, case.hidden, 5.0 if case.tied else np.sqrt(case.hidden))
    norm("output_norm", case.hidden)
    if not case.tied:
        matrix("output", vocab, case.hidden, 2.5)
    if case.rope_divisors:
        vector("rope_freqs.weight", np.linspace(1, 8, case.width // 2))
    for i in range(case.layers):
        norm(f"blk.{i}.attn_norm", case.hidden)
        if case.latent:
            latent(case, i, matrix, norm, found)
        else:
            attention(case, i, matrix, norm, bias, vector)
        norm(f"blk.{i}.{case.ffn_norm}", case.hidden)
        feed_forward(case, i, matrix, bias, vector, found)
    return found


def attention(case: Case, i: int, matrix, norm, bias, vector):
    """Grouped-query attention of a layer."""
    queries, keys = case.heads * case.width, case.kv_heads * case.width
    for name, rows in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
        matrix(f"blk.{i}.{name}", rows, case.hidden, 0.8)
        bias(f"blk.{i}.{name}", rows)
    if case.qk_norm:
        norm(f"blk.{i}.attn_q_norm", case.width)
        norm(f"blk.{i}.attn_k_norm", case.width)
    matrix(f"blk.{i}.attn_output", case.hidden, queries, 0.8 / np.sqrt(2 * case.layers))
    if case.architecture in ("llama", "gpt-oss"):
        bias(f"blk.{i}.attn_output", case.hidden)
    if case.architecture == "gpt-oss":
        vector(f"blk.{i}.attn_sinks.weight", np.linspace(-1, 1, case.heads))


def latent(case: Case, i: int, matrix, norm, found: dict):
    """Latent attention of a layer, kv_b in two stacks of heads or whole."""
    queries, rank, plain, rotated, width = case.latent
    matrix(f"blk.{i}.attn_q_a", queries, case.hidden, 0.8)
    norm(f"blk.{i}.attn_q_a_norm", queries)
    matrix(f"blk.{i}.attn_q_b", case.heads * (plain + rotated), queries, 0.8)
    matrix(f"blk.{i}.attn_kv_a_mqa", rank + rotated, case.hidden, 0.8)
    norm(f"blk.{i}.attn_kv_a_norm", rank)
    if case.whole_kv_b:
        matrix(f"blk.{i}.attn_kv_b", case.heads * (plain + width), rank, 0.8)
    else:
        stack(matrix, found, f"blk.{i}.attn_k_b", case.heads, rank, plain, 0.8 * np.sqrt(plain / rank))
        stack(matrix, found, f"blk.{i}.attn_v_b", case.heads, width, rank, 0.8)
    matrix(f"blk.{i}.attn_output", case.hidden, case.heads * width, 0.8 / np.sqrt(2 * case.layers))


def stack(matrix, found: dict, name: str, count: int, rows: int, columns: int, gain: float):
    """`count` matrices in one tensor."""
    matrix(name, count * rows, columns, gain)
    kind, data = found[f"{name}.weight"]
    found[f"{name}.weight"] = (kind, data.reshape(count, rows, -1))


def feed_forward(case: Case, i: int, matrix, bias, vector, found: dict):
    """A plain MLP, or experts."""
    out_gain = 0.8 / np.sqrt(2 * case.layers)

    def gated(end, channels, count=None):
        for name, rows, columns, gain in (("gate", channels, case.hidden, 0.8), ("up", channels, case.hidden, 0.8),
                                          ("down", case.hidden, channels, out_gain)):  # fmt: skip
            name = f"blk.{i}.ffn_{name}{end}"
            if count is None:
                matrix(name, rows, columns, gain)
            else:
                stack(matrix, found, name, count, rows, columns, gain)

    if not case.experts or i < case.dense_layers:
        gated("", case.channels)
        return
    rng = np.random.default_rng(i)
    vector(f"blk.{i}.ffn_gate_inp.weight", 2.0 / np.sqrt(case.hidden) * rng.standard_normal((case.experts, case.hidden)))
    gated("_exps", case.expert_channels, case.experts)
    if case.architecture == "gpt-oss":
        bias(f"blk.{i}.ffn_gate_inp", case.experts)
        for name, rows in (("gate", case.expert_channels), ("up", case.expert_channels), ("down", case.hidden)):
            bias(f"blk.{i}.ffn_{name}_exps", (case.experts, rows))
    if case.corrected:
        vector(f"blk.{i}.exp_probs_b.bias", 0.1 * rng.standard_normal(case.experts))
    if case.shared_channels:
        gated("_shexp", case.shared_channels)
    if case.architecture == "qwen2moe":
        vector(f"blk.{i}.ffn_gate_inp_shexp.weight", 2.0 / np.sqrt(case.hidden) * rng.standard_normal(case.hidden))


def write(case: Case, path: Path, tokenizer: list, stored: dict, parts: int):
    writer = gguf.GGUFWriter(path, case.architecture, split_max_tensors=-(-len(stored) // parts) if parts > 1 else 0)
    numbers = {
        "block_count": case.layers, "context_length": 256, "embedding_length": case.hidden,
        "feed_forward_length": case.channels, "attention.head_count": case.heads,
        "attention.head_count_kv": case.kv_heads, "attention.key_length": case.width,
        "attention.value_length": case.width, "rope.dimension_count": case.width,
    }  # fmt: skip
    if case.latent:
        _, rank, plain, rotated, width = case.latent
        # Files with kv_b in two parts see one KV head as wide as the cache.
        mla = {"attention.key_length_mla": plain + rotated, "attention.value_length_mla": width,
               "attention.key_length": rank + rotated, "attention.value_length": rank}  # fmt: skip
        whole = {"attention.key_length": plain + rotated, "attention.value_length": width}
        numbers |= whole if case.whole_kv_b else mla
    if case.experts:
        numbers["expert_count"] = case.experts
    for name, number in numbers.items():
        if name in case.values:
            continue
        writer.add_uint32(f"{case.architecture}.{name}", number)
    writer.add_float32(f"{case.architecture}.rope.freq_base", 10000.0)
    writer.add_float32(f"{case.architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, value in case.values.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[type(value)]
        add(f"{case.architecture}.{name}", value)
    for kind, key, value in tokenizer:
        getattr(writer, f"add_{kind}")(key, value)
    for name, (kind, data) in stored.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_f32(stored: dict) -> dict:
    """The same values in f32: llama.cpp multiplies quantized weights with rounded activations."""
    return {name: (T.F32, gguf.dequantize(data, kind)) for name, (kind, data) in stored.items()}


def logits(program: Path, model: Path, prompt: np.ndarray, folder: Path) -> np.ndarray:
    tokens, out = folder / "tokens", folder / "logits"
    tokens.write_bytes(prompt.astype(np.int32).tobytes())
    subprocess.run([program, model, tokens, out], check=True, stderr=subprocess.DEVNULL)
    return np.frombuffer(out.read_bytes(), np.float32).reshape(len(prompt), -1)


def write_case(case: Case, out: Path, program: Path, folder: Path):
    tokenizer = tokenizer_values(TEXT / case.text)
    vocab = len(next(value for _, key, value in tokenizer if key == "tokenizer.ggml.tokens"))
    stored = tensors(case, vocab)
    write(case, out / f"{case.name}.gguf", tokenizer, stored, case.parts)
    first = f"{case.name}-00001-of-{case.parts:05}.gguf" if case.parts > 1 else f"{case.name}.gguf"
    plain = folder / "plain.gguf"
    write(case, plain, tokenizer, in_f32(stored), 1)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()) + 1)
    golden, errors = {}, []
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = rng.integers(0, vocab, length).astype(np.int32)
        if length > 8:
            prompt[3], prompt[7] = 0, vocab - 1
        kept = np.array(LAST_PROMPT_POSITIONS if length == 70 else range(length), np.int32)
        exact, same = (logits(program, model, prompt, folder) for model in (plain, out / first))
        golden |= {f"tokens.{i}": prompt, f"positions.{i}": kept, f"argmax.{i}": exact.argmax(-1).astype(np.int32)}
        golden |= {f"logits.{i}": exact[kept].copy(), f"same_file.{i}": same[kept].copy()}
        errors.append(np.linalg.norm(same - exact) / np.linalg.norm(exact))
    save_file(golden, out / f"{case.name}.safetensors")
    size = sum(file.stat().st_size for file in out.glob(f"{case.name}*"))
    print(f"{case.name:20} {size / 1000:6.0f} kB   spread {exact.std():.2f}   llama.cpp on the file: {max(errors):.1e} off")


def build(llama_cpp: Path, folder: Path, program_source: str = "logits.cpp") -> Path:
    source = next(llama_cpp.glob("llama_cpp_python-*/vendor/llama.cpp"))
    libraries = max((path.parent for path in llama_cpp.glob("build-*/CMakeCache.txt")), key=lambda p: p.stat().st_mtime)
    program = folder / "program"
    names = ["src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-rpc/libggml-rpc.a",
             "ggml/src/ggml-rpc/libggml-rpc.a", "ggml/src/libggml-base.a"]  # fmt: skip
    archives = [libraries / name for name in names if (libraries / name).exists()]
    subprocess.run(
        ["g++", "-O1", "-std=c++17", Path(__file__).with_name(program_source), f"-I{source}/include",
         f"-I{source}/ggml/include", "-o", program, "-Wl,--start-group", *archives, "-Wl,--end-group",
         "-fopenmp", "-lpthread", "-ldl", "-lm"],
        check=True,
    )  # fmt: skip
    return program


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, default=Path.home() / ".cache/thunderhead/llama.cpp")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "cases")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to make (all, if none is named)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_blocks(args.out / "blocks.safetensors")
    with tempfile.TemporaryDirectory() as name:
        program = build(args.llama_cpp, Path(name))
        for case in CASES:
            if not args.names or case.name in args.names:
                write_case(case, args.out, program, Path(name))


if __name__ == "__main__":
    main()
