#!/usr/bin/env python3
"""Makes the golden fixtures of layers that predict further tokens: folders of cases/ with one such layer added, and what it predicts.

    python3 tests/golden/make_ahead.py [--out DIR] [NAME...]

Needs NumPy only. Neither transformers nor MLX-LM computes these layers. The mathematics is that of DeepSeek-V3's report (section 2.2) and of vLLM's
deepseek_mtp.py, glm4_moe_mtp.py and mimo_mtp.py, written anew here; vLLM zeroes the embedding at position 0, which the report does not. The whole model
is computed in f64, and its logits are compared with those of transformers or MLX-LM in the case's folder before the new layer is trusted.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np

import fixture

HERE = Path(__file__).parent
# The folder of cases/ that each fixture adds a layer to.
CASES = {"deepseek_v3": "transformers-deepseek_v3", "glm4_moe": "transformers-glm4_moe", "mimo": "qwen2-bf16"}
LENGTHS = (2, 41, 70)


def read(path: Path) -> dict:
    """The tensors of a safetensors file in f64, or as integers."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        raw = data[8 + length + first : 8 + length + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            values = np.frombuffer(raw, {"F32": np.float32, "I32": np.int32}[entry["dtype"]])
            values = values.astype(np.float64) if entry["dtype"] == "F32" else values
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def to_bf16(values) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Model:
    """A decoder: grouped-query or latent attention, a plain MLP or experts with a sigmoid router."""

    def __init__(self, config: dict, weights: dict):
        self.c, self.w = config, weights
        self.eps = config["rms_norm_eps"]
        rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
        self.head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.latent = "kv_lora_rank" in config
        dims = config["qk_rope_head_dim"] if self.latent else int(self.head * rope.get("partial_rotary_factor", 1.0))
        self.dims, self.amplitude, self.sharper = dims, 1.0, 1.0
        base = rope["rope_theta"]
        self.frequencies = base ** (-2.0 * np.arange(dims // 2) / dims)
        if rope["rope_type"] == "yarn":
            factor, original = rope["factor"], rope["original_max_position_embeddings"]

            def dimension(turns):
                return dims * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base))

            low, high = max(np.floor(dimension(rope["beta_fast"])), 0), min(np.ceil(dimension(rope["beta_slow"])), dims - 1)
            ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
            self.frequencies = self.frequencies * (1 - ramp) + self.frequencies / factor * ramp

            def mscale(m):
                return 0.1 * m * np.log(factor) + 1

            self.amplitude = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
            self.sharper = mscale(rope["mscale_all_dim"]) ** 2

    def linear(self, x, name):
        out = x @ self.w[f"{name}.weight"].T
        bias = self.w.get(f"{name}.bias")
        return out if bias is None else out + bias

    def rotate(self, x):
        """Rotates the first `dims` columns of `[tokens, heads, columns]`: pairs of neighbours with latent attention, else of halves."""
        angles = np.arange(len(x))[:, None, None] * self.frequencies
        cos, sin = np.cos(angles) * self.amplitude, np.sin(angles) * self.amplitude
        out, half = x.copy(), self.dims // 2
        first, second = (slice(0, self.dims, 2), slice(1, self.dims, 2)) if self.latent else (slice(0, half), slice(half, self.dims))
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def attend(self, q, k, v, scale):
        scores = np.einsum("ihd,jhd->hij", q, k) * scale
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        return np.einsum("hij,jhd->ihd", softmax(scores), v).reshape(len(q), -1)

    def attention(self, x, at):
        c, n, heads = self.c, len(x), self.c["num_attention_heads"]
        if self.latent:
            plain, rotated, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
            down = norm(self.linear(x, f"{at}.q_a_proj"), self.w[f"{at}.q_a_layernorm.weight"], 1e-6)
            q = self.linear(down, f"{at}.q_b_proj").reshape(n, heads, plain + rotated)
            both = self.linear(x, f"{at}.kv_a_proj_with_mqa")
            kv = self.linear(norm(both[:, :rank], self.w[f"{at}.kv_a_layernorm.weight"], 1e-6), f"{at}.kv_b_proj").reshape(n, heads, -1)
            shared = np.repeat(self.rotate(both[:, None, rank:]), heads, 1)
            q = np.concatenate([q[..., :plain], self.rotate(q[..., plain:])], -1)
            k = np.concatenate([kv[..., :plain], shared], -1)
            out = self.attend(q, k, kv[..., plain:], self.sharper / np.sqrt(plain + rotated))
        else:
            q, k, v = (self.linear(x, f"{at}.{p}_proj").reshape(n, -1, self.head) for p in "qkv")
            if f"{at}.q_norm.weight" in self.w:
                q, k = norm(q, self.w[f"{at}.q_norm.weight"], self.eps), norm(k, self.w[f"{at}.k_norm.weight"], self.eps)
            k, v = (np.repeat(t, heads // k.shape[1], 1) for t in (self.rotate(k), v))
            out = self.attend(self.rotate(q), k, v, 1 / np.sqrt(self.head))
        return self.linear(out, f"{at}.o_proj")

    def mlp(self, x, at):
        return self.linear(silu(self.linear(x, f"{at}.gate_proj")) * self.linear(x, f"{at}.up_proj"), f"{at}.down_proj")

    def feed_forward(self, x, at):
        c = self.c
        if f"{at}.gate.weight" not in self.w:
            return self.mlp(x, at)
        scores = 1 / (1 + np.exp(-self.linear(x, f"{at}.gate")))
        out = self.mlp(x, f"{at}.shared_experts")
        for row, score in enumerate(scores):
            choice = score + self.w[f"{at}.gate.e_score_correction_bias"]
            groups = choice.reshape(c["n_group"], -1)
            best = np.argsort(-np.sort(groups, 1)[:, -2:].sum(1), kind="stable")[: c["topk_group"]]
            allowed = np.isin(np.arange(c["n_group"]), best)
            choice = np.where(np.repeat(allowed, groups.shape[1]), choice, 0.0)
            chosen = np.argsort(-choice, kind="stable")[: c["num_experts_per_tok"]]
            weights = score[chosen] / (score[chosen].sum() + 1e-20) * c["routed_scaling_factor"]
            for weight, expert in zip(weights, chosen):
                out[row] += weight * self.mlp(x[row : row + 1], f"{at}.experts.{expert}")[0]
        return out

    def layer(self, x, at):
        x = x + self.attention(norm(x, self.w[f"{at}.input_layernorm.weight"], self.eps), f"{at}.self_attn")
        return x + self.feed_forward(norm(x, self.w[f"{at}.post_attention_layernorm.weight"], self.eps), f"{at}.mlp")

    def embed(self, tokens):
        return self.w["model.embed_tokens.weight"][tokens]

    def hidden(self, tokens):
        """The hidden states after the last norm."""
        x = self.embed(tokens)
        for index in range(self.c["num_hidden_layers"]):
            x = self.layer(x, f"model.layers.{index}")
        return norm(x, self.w["model.norm.weight"], self.eps)

    def logits(self, hidden):
        return hidden @ self.w["lm_head.weight"].T


# Names of a layer that predicts further tokens: norms of embedding and hidden state, projection,
# last norm.
USUAL = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def ahead(model: Model, at: str, names: tuple, hidden, following):
    """Logits of the tokens after `following`, and what stands for the hidden states at the next positions."""
    e, h, projection, last = (f"{at}.{name}" for name in names)
    embedded = norm(model.embed(following), model.w[f"{e}.weight"], model.eps)
    hidden = norm(hidden, model.w[f"{h}.weight"], model.eps)
    pair = [hidden, embedded] if names is MIMO else [embedded, hidden]
    out = model.layer(model.linear(np.concatenate(pair, -1), projection), at)
    normed = norm(out, model.w[f"{last}.weight"], model.eps)
    return model.logits(normed), normed if names is MIMO else out


def add_layer(name: str, config: dict, weights: dict) -> tuple:
    """Adds a layer like the last one, with other weights. Returns its place and the names of its own tensors."""
    number = config["num_hidden_layers"]
    at, names = ("model.mtp_layers.0", MIMO) if name == "mimo" else (f"model.layers.{number}", USUAL)
    rng, before = fixture.generator(f"ahead-{name}"), f"model.layers.{number - 1}."
    for key in sorted(weights):
        if key.startswith(before):
            shape = weights[key].shape
            spread = 0.1 if len(shape) == 1 else 0.8 / np.sqrt(shape[-1]) / (2.0 if key.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
            middle = 1.0 if key.endswith("norm.weight") else 0.0
            weights[f"{at}.{key.removeprefix(before)}"] = middle + spread * rng.standard_normal(shape)
    width = config["hidden_size"]
    for key in (names[0], names[1], names[3]):
        weights[f"{at}.{key}.weight"] = 1.0 + 0.1 * rng.standard_normal(width)
    weights[f"{at}.{names[2]}.weight"] = rng.standard_normal((width, 2 * width)) * 0.8 / np.sqrt(2 * width)
    for key in [key for key in weights if key.startswith(at)]:
        stored = to_bf16(weights[key])
        weights[key] = (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(weights[key].shape)
    return at, names


def make(name: str, folder: Path):
    base = HERE / "cases" / CASES[name]
    config, weights = json.loads((base / "config.json").read_text()), read(base / "model.safetensors")
    golden, model = read(base / "golden.safetensors"), Model(config, weights)
    for i in range(3):
        ours = model.logits(model.hidden(golden[f"tokens.{i}"]))[golden[f"positions.{i}"]]
        error = np.linalg.norm(ours - golden[f"logits.{i}"]) / np.linalg.norm(ours)
        assert error < 2e-5, f"{base.name}: {error:.1e} from the reference"
    at, names = add_layer(name, config, weights)
    config["num_nextn_predict_layers"] = 1
    if name == "mimo":
        config["model_type"] = "mimo"
    else:
        # Published checkpoints repeat the embedding and the head.
        weights[f"{at}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        weights[f"{at}.shared_head.head.weight"] = weights["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    is_f32 = lambda key: key.endswith("e_score_correction_bias")
    stored = {key: ("F32", v.shape, v.astype(np.float32).tobytes()) if is_f32(key) else ("BF16", v.shape, to_bf16(v).tobytes()) for key, v in weights.items()}
    fixture.write_safetensors(folder / "model.safetensors", stored)
    rng, arrays = fixture.generator(f"ahead-{name}", 1), {}
    for i, length in enumerate(LENGTHS):
        tokens = rng.integers(0, config["vocab_size"], length).astype(np.int32)
        hidden = model.hidden(tokens)
        logits, chained = ahead(model, at, names, hidden[:-1], tokens[1:])
        # The layer guesses a token after the last, from what it said itself.
        guess = logits[-1].argmax()
        states = np.concatenate([hidden[:-1], chained[-1:]])
        further, _ = ahead(model, at, names, states, np.append(tokens[1:], guess))
        arrays |= {f"tokens.{i}": tokens, f"positions.{i}": np.arange(length - 1, dtype=np.int32)}
        arrays |= {f"logits.{i}": logits, f"argmax.{i}": logits.argmax(-1).astype(np.int32), f"further.{i}": further[-1]}
    typed = lambda v: ("I32", v.shape, v.tobytes()) if v.dtype == np.int32 else ("F32", v.shape, v.astype(np.float32).tobytes())
    fixture.write_safetensors(folder / "golden.safetensors", {key: typed(value) for key, value in arrays.items()})
    print(f"{name}: logits' standard deviation {arrays['logits.2'].std():.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "ahead", help="where the folders go")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to make (all, if none is named)")
    args = parser.parse_args()
    for name in args.names or CASES:
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(name, folder)


if __name__ == "__main__":
    main()
