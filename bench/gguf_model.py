#!/usr/bin/env python3
"""Writes a GGUF file of a true shape with random weights: gguf_model.py SHAPE TYPE FILE (see llama_cpp.sh).

The blocks' bytes are random and their scales all the same, so that gigabytes take seconds. Every matrix, the embedding too,
has the same type, so that the bits a weight are those of Thunderhead's folder of the same shape.
"""

import sys

import gguf
import numpy as np

# architecture, layers, hidden, channels, query heads, KV heads, head width, vocabulary, rope base
SHAPES = {
    "llama-1b": ("llama", 16, 2048, 8192, 32, 8, 64, 128256, 500000.0),
    "llama-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, 500000.0),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 1000000.0),
    "qwen3-30b-a3b": ("qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, 1000000.0),
    # A quarter of its layers.
    "qwen3-30b-a3b-12": ("qwen3moe", 12, 2048, 6144, 32, 4, 128, 151936, 1000000.0),
}
# Shapes with a separate output head.
UNTIED = {"llama-8b", "qwen3-30b-a3b", "qwen3-30b-a3b-12"}
# Experts, experts that a token takes, channels of an expert.
EXPERTS = {"qwen3moe": (128, 8, 768)}
TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q6_k": gguf.GGMLQuantizationType.Q6_K,
}


def blocks(rng, rows: int, columns: int, kind) -> np.ndarray:
    """Random blocks of weights, mean about 0 and standard deviation 1 / sqrt(columns): u8 [rows, bytes]."""
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block_columns, block_bytes), dtype=np.uint8)
    types = gguf.GGMLQuantizationType
    levels = {types.Q8_0: 256, types.Q6_K: 64}.get(kind, 16)
    # A uniform variable over n levels has a standard deviation of n / sqrt(12) steps.
    step = np.sqrt(12 / columns) / levels
    # The groups' scales are 32 in units of the block's.
    numbers = {types.Q4_1: [step, -7.5 * step], types.Q4_K: [step / 32, 7.5 * step / 32], types.Q6_K: [step / 32]}
    head = np.array(numbers.get(kind, [step]), np.float16).view(np.uint8)
    if kind == types.Q6_K:
        data[..., 192:208] = 32
        data[..., 208:210] = head
    else:
        data[..., : len(head)] = head
    if kind == types.Q4_K:
        # 32 as scale and as offset of each group, in 6 bits.
        data[..., 4:16] = [160] * 8 + [0] * 4
    return data.reshape(rows, -1)


def vocabulary(size: int) -> list:
    """Byte-level tokens: one of each byte, then words."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)] + [f"t{i}" for i in range(size - 256)]


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in SHAPES or sys.argv[2] not in TYPES:
        sys.exit(f"{__doc__}\nSHAPE: {', '.join(SHAPES)}; TYPE: {', '.join(TYPES)}")
    shape, kind, path = sys.argv[1], TYPES[sys.argv[2]], sys.argv[3]
    architecture, layers, hidden, channels, heads, kv_heads, width, vocab, base = SHAPES[shape]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(channels)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    if architecture in EXPERTS:
        experts, chosen, expert_channels = EXPERTS[architecture]
        writer.add_expert_count(experts)
        writer.add_expert_used_count(chosen)
        writer.add_expert_feed_forward_length(expert_channels)
    # llama-bench feeds token numbers, but thunder reads the tokenizer.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary(vocab))
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(vocab - 1)

    rng = np.random.default_rng(0)

    def matrix(name, rows, columns):
        writer.add_tensor(f"{name}.weight", blocks(rng, rows, columns, kind), raw_dtype=kind)

    def norm(name, size):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", vocab, hidden)
    norm("output_norm", hidden)
    if shape in UNTIED:
        matrix("output", vocab, hidden)
    for i in range(layers):
        norm(f"blk.{i}.attn_norm", hidden)
        matrix(f"blk.{i}.attn_q", heads * width, hidden)
        matrix(f"blk.{i}.attn_k", kv_heads * width, hidden)
        matrix(f"blk.{i}.attn_v", kv_heads * width, hidden)
        matrix(f"blk.{i}.attn_output", hidden, heads * width)
        if architecture in ("qwen3", "qwen3moe"):
            norm(f"blk.{i}.attn_q_norm", width)
            norm(f"blk.{i}.attn_k_norm", width)
        norm(f"blk.{i}.ffn_norm", hidden)
        if architecture in EXPERTS:
            # Scores as far apart as a trained router's; f32, as llama.cpp's converter keeps them.
            router = rng.standard_normal((experts, hidden), np.float32) / np.float32(np.sqrt(hidden))
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
            for name, rows, columns in [
                ("gate", expert_channels, hidden), ("up", expert_channels, hidden), ("down", hidden, expert_channels)
            ]:
                data = blocks(rng, experts * rows, columns, kind).reshape(experts, rows, -1)
                writer.add_tensor(f"blk.{i}.ffn_{name}_exps.weight", data, raw_dtype=kind)
            continue
        matrix(f"blk.{i}.ffn_gate", channels, hidden)
        matrix(f"blk.{i}.ffn_up", channels, hidden)
        matrix(f"blk.{i}.ffn_down", hidden, channels)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
