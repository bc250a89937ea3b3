#!/usr/bin/env python3
"""Writes a GGUF file of a true shape with random weights: gguf_model.py SHAPE TYPE FILE (see llama_cpp.sh).

The blocks' bytes are random and their scales all the same, so that gigabytes take seconds. Unless TYPE is a mixture, every matrix, the embedding too,
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
    "qwen3-32b": ("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 1000000.0),
    "qwen3-30b-a3b": ("qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, 1000000.0),
    "gpt-oss-20b": ("gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, 150000.0),
    "deepseek-v2-lite": ("deepseek2", 27, 2048, 10944, 16, 1, 192, 102400, 10000.0),
}
# Shapes with a separate output head.
UNTIED = {"llama-8b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"}
# Experts, experts that a token takes, channels of an expert.
EXPERTS = {"qwen3moe": (128, 8, 768), "gpt-oss": (32, 4, 2880), "deepseek2": (64, 6, 1408)}
# Latent attention of DeepSeek V2: width of the compressed vector, of the rotated part, of a value.
LATENT, ROTATED, VALUE = 512, 64, 128
# Experts that every token takes, and layers without experts (DeepSeek V2).
SHARED, LEADING_DENSE = 2, 1
TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q6_k": gguf.GGMLQuantizationType.Q6_K,
    "iq4_xs": gguf.GGMLQuantizationType.IQ4_XS,
    # Mixtures: most matrices have this type, see `kind_of`.
    "q4_k_m": gguf.GGMLQuantizationType.Q4_K,
    "mxfp4": gguf.GGMLQuantizationType.MXFP4,
}


# Random bytes that larger matrices repeat: drawing them takes longer than writing a file.
POOL_BYTES = 64 << 20


def random_bytes(rng, *shape: int) -> np.ndarray:
    count = int(np.prod(shape))
    drawn = rng.integers(0, 256, min(count, POOL_BYTES), dtype=np.uint8)
    return np.resize(drawn, shape)


def blocks(rng, rows: int, columns: int, kind) -> np.ndarray:
    """Random blocks of weights, mean about 0 and standard deviation 1 / sqrt(columns): u8 [rows, bytes]."""
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random_bytes(rng, rows, columns // block_columns, block_bytes)
    types = gguf.GGMLQuantizationType
    levels = {types.Q8_0: 256, types.Q6_K: 64, types.Q5_0: 32}.get(kind, 16)
    if kind == types.MXFP4:
        # A power of two for each group; the 16 levels have a standard deviation of 2.9.
        data[..., 0] = 127 + round(float(np.log2(1 / np.sqrt(columns) / 2.9)))
        return data.reshape(rows, -1)
    if kind == types.IQ4_XS:
        # The table's values have a standard deviation of 67. The groups' scales are 48 - 32.
        data[..., :2] = np.array([1 / np.sqrt(columns) / 67 / 16], np.float16).view(np.uint8)
        data[..., 2:4], data[..., 4:8] = 255, 0
        return data.reshape(rows, -1)
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


def kind_of(mixture: str, name: str, layers: int, tied: bool, columns: int):
    """The type of matrix `name` (without `.weight`): as llama.cpp's quantizer mixes them.

    Rows that are no whole blocks of 256 columns have a type with blocks of 32.

    Q4_K_M has Q6_K for the head, and for values and down projections of the first and last eighth of the
    layers and every third between. Files of gpt-oss have MXFP4 for experts and Q8_0 for the rest.
    """
    types = gguf.GGMLQuantizationType
    kind = mixed_kind(mixture, name, layers, tied)
    return {types.Q4_K: types.Q5_0, types.Q6_K: types.Q8_0}.get(kind, kind) if columns % 256 else kind


def mixed_kind(mixture: str, name: str, layers: int, tied: bool):
    """The same without regard to columns."""
    types = gguf.GGMLQuantizationType
    if mixture == "mxfp4":
        return types.MXFP4 if "_exps" in name else types.Q8_0
    if mixture == "q4_k_m":
        if name == ("token_embd" if tied else "output"):
            return types.Q6_K
        if name.removesuffix("_exps").removesuffix("_shexp").endswith(("attn_v", "ffn_down")):
            layer, eighth = int(name.split(".")[1]), layers // 8
            if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
                return types.Q6_K
    return TYPES[mixture]


def vocabulary(size: int) -> list:
    """Byte-level tokens: one of each byte, then words."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)] + [f"t{i}" for i in range(size - 256)]


def main():
    shape, _, cut = sys.argv[1].rpartition("-") if len(sys.argv) == 4 and sys.argv[1] not in SHAPES else (*sys.argv[1:2], "", "")
    if len(sys.argv) != 4 or shape not in SHAPES or sys.argv[2] not in TYPES or not (cut or "1").isdigit():
        sys.exit(f"{__doc__}\nSHAPE: {', '.join(SHAPES)}, also with -LAYERS; TYPE: {', '.join(TYPES)}")
    mixture, path = sys.argv[2:]
    architecture, layers, hidden, channels, heads, kv_heads, width, vocab, base = SHAPES[shape]
    layers = int(cut or layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(channels)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if architecture == "deepseek2":
        writer.add_key_length(LATENT + ROTATED)
        writer.add_value_length(LATENT)
        writer.add_key_length_mla(width)
        writer.add_value_length_mla(VALUE)
        writer.add_kv_lora_rank(LATENT)
        # Queries are not compressed. llama.cpp takes that from the number of layers (26 or 27), and
        # wants the rank from other files.
        writer.add_q_lora_rank(0)
        writer.add_rope_dimension_count(ROTATED)
        writer.add_leading_dense_block_count(LEADING_DENSE)
        writer.add_expert_shared_count(SHARED)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(False)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    else:
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_rope_dimension_count(width)
    if architecture == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
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
    # Both servers' chat API wants one.
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")

    rng = np.random.default_rng(0)

    def matrix(name, rows, columns, stack=()):
        kind = kind_of(mixture, name, layers, shape not in UNTIED, columns)
        data = blocks(rng, int(np.prod(stack)) * rows, columns, kind)
        writer.add_tensor(f"{name}.weight", data.reshape(*stack, rows, -1), raw_dtype=kind)

    def vector(name, *shape, value=0.0):
        writer.add_tensor(name, np.full(shape, value, np.float32))

    def norm(name, size):
        vector(f"{name}.weight", size, value=1.0)

    def feed_forward(i, suffix, channels, stack=()):
        matrix(f"blk.{i}.ffn_gate{suffix}", channels, hidden, stack)
        matrix(f"blk.{i}.ffn_up{suffix}", channels, hidden, stack)
        matrix(f"blk.{i}.ffn_down{suffix}", hidden, channels, stack)

    matrix("token_embd", vocab, hidden)
    norm("output_norm", hidden)
    if shape in UNTIED:
        matrix("output", vocab, hidden)
    for i in range(layers):
        norm(f"blk.{i}.attn_norm", hidden)
        matrix(f"blk.{i}.attn_q", heads * width, hidden)
        if architecture == "deepseek2":
            matrix(f"blk.{i}.attn_kv_a_mqa", LATENT + ROTATED, hidden)
            norm(f"blk.{i}.attn_kv_a_norm", LATENT)
            matrix(f"blk.{i}.attn_k_b", LATENT, width - ROTATED, (heads,))
            matrix(f"blk.{i}.attn_v_b", VALUE, LATENT, (heads,))
            matrix(f"blk.{i}.attn_output", hidden, heads * VALUE)
        else:
            matrix(f"blk.{i}.attn_k", kv_heads * width, hidden)
            matrix(f"blk.{i}.attn_v", kv_heads * width, hidden)
            matrix(f"blk.{i}.attn_output", hidden, heads * width)
        if architecture in ("qwen3", "qwen3moe"):
            norm(f"blk.{i}.attn_q_norm", width)
            norm(f"blk.{i}.attn_k_norm", width)
        norm(f"blk.{i}.{'post_attention_norm' if architecture == 'gpt-oss' else 'ffn_norm'}", hidden)
        if architecture not in EXPERTS or (architecture == "deepseek2" and i < LEADING_DENSE):
            feed_forward(i, "", channels)
            continue
        # Scores as far apart as a trained router's; f32, as llama.cpp's converter keeps them.
        router = rng.standard_normal((experts, hidden), np.float32) / np.float32(np.sqrt(hidden))
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        feed_forward(i, "_exps", expert_channels, (experts,))
        if architecture == "deepseek2":
            feed_forward(i, "_shexp", SHARED * expert_channels)
        if architecture == "gpt-oss":
            for name, size in [("q", heads * width), ("k", kv_heads * width), ("v", kv_heads * width), ("output", hidden)]:
                vector(f"blk.{i}.attn_{name}.bias", size)
            vector(f"blk.{i}.attn_sinks.weight", heads)
            vector(f"blk.{i}.ffn_gate_inp.bias", experts)
            for name, size in [("gate", expert_channels), ("up", expert_channels), ("down", hidden)]:
                vector(f"blk.{i}.ffn_{name}_exps.bias", experts, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
