#!/usr/bin/env python3
"""Makes the golden fixtures of layers that predict further tokens: folders of cases/ with one such layer added, and what it predicts.

    python3 tests/golden/make_ahead.py [--out DIR] [--vllm qwen3_next_mtp.py] [NAME...]

Needs NumPy only. Neither transformers nor MLX-LM computes these layers. The mathematics is that of DeepSeek-V3's report (section 2.2) and of vLLM's
deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py and qwen3_next_mtp.py (0.11.0; vllm/model_executor/models), written anew here; the layers of Qwen3-Next and
Qwen3.5 are those of transformers' modeling_qwen3_next.py and modeling_qwen3_5.py. For the first token vLLM zeroes the embedding at position 0, which the report does not. The whole model
is computed in f64, and its logits are compared with those of transformers or MLX-LM in the case's folder before the new layer is trusted.
"""

import argparse
import ast
import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import fixture

HERE = Path(__file__).parent
# The folder of cases/ that each fixture adds a layer to.
CASES = {
    "deepseek_v3": "transformers-deepseek_v3",
    "glm4_moe": "transformers-glm4_moe",
    "mimo": "qwen2-bf16",
    "qwen3_next": "transformers-qwen3_next",
    "qwen3_5": "transformers-qwen3_5",
}
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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Model:
    """A decoder: grouped-query or latent attention or the gated delta rule, a plain MLP or experts with a sigmoid or softmax router."""

    def __init__(self, config: dict, weights: dict):
        self.c, self.w = config, weights
        self.eps = config["rms_norm_eps"]
        rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
        self.head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.latent = "kv_lora_rank" in config
        self.delta = "linear_num_key_heads" in config
        # Files of models with the delta rule have norm weights less one.
        self.less = 1.0 if self.delta else 0.0
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
            gate = 1.0
            if self.delta:
                # Each head's query, then its gate.
                q, gate = q[:, 0::2], sigmoid(q[:, 1::2]).reshape(n, -1)
            if f"{at}.q_norm.weight" in self.w:
                q, k = self.normed(q, f"{at}.q_norm"), self.normed(k, f"{at}.k_norm")
            k, v = (np.repeat(t, heads // k.shape[1], 1) for t in (self.rotate(k), v))
            out = self.attend(self.rotate(q), k, v, 1 / np.sqrt(self.head)) * gate
        return self.linear(out, f"{at}.o_proj")

    def delta_rule(self, x, at):
        """Qwen3NextGatedDeltaNet and Qwen3_5GatedDeltaNet of transformers, a token after the other."""
        c, n = self.c, len(x)
        heads, of_keys = c["linear_num_value_heads"], c["linear_num_key_heads"]
        key, value, each = c["linear_key_head_dim"], c["linear_value_head_dim"], heads // of_keys
        if f"{at}.in_proj_qkvz.weight" in self.w:
            # By key heads: query, key, the values of its heads, their gates; strengths, decays.
            parts = self.linear(x, f"{at}.in_proj_qkvz").reshape(n, of_keys, -1)
            q, k, v, z = np.split(parts, np.cumsum([key, key, each * value]), -1)
            b, a = np.split(self.linear(x, f"{at}.in_proj_ba").reshape(n, of_keys, -1), 2, -1)
            qkv = np.concatenate([t.reshape(n, -1) for t in (q, k, v)], -1)
        else:
            qkv, z, b, a = (self.linear(x, f"{at}.in_proj_{p}") for p in ("qkv", "z", "b", "a"))
        z, b, a = z.reshape(n, heads, value), b.reshape(n, heads), a.reshape(n, heads)
        taps = self.w[f"{at}.conv1d.weight"][:, 0]
        before = np.concatenate([np.zeros((taps.shape[1] - 1, taps.shape[0])), qkv])
        qkv = silu(sum(before[k : k + n] * taps[:, k] for k in range(taps.shape[1])))
        q, k, v = np.split(qkv, np.cumsum([of_keys * key] * 2), -1)
        unit = lambda t: t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6)
        q, k = (np.repeat(unit(t.reshape(n, of_keys, key)), each, 1) for t in (q, k))
        q, v, strength = q / np.sqrt(key), v.reshape(n, heads, value), sigmoid(b)
        decay = np.exp(-np.exp(self.w[f"{at}.A_log"]) * np.logaddexp(0, a + self.w[f"{at}.dt_bias"]))
        state, out = np.zeros((heads, key, value)), np.zeros((n, heads, value))
        for i in range(n):
            state *= decay[i][:, None, None]
            known = np.einsum("hkv,hk->hv", state, k[i])
            state += np.einsum("hk,hv->hkv", k[i], (v[i] - known) * strength[i][:, None])
            out[i] = np.einsum("hkv,hk->hv", state, q[i])
        # This norm's weight is not less one.
        out = norm(out, self.w[f"{at}.norm.weight"], self.eps) * silu(z)
        return self.linear(out.reshape(n, -1), f"{at}.out_proj")

    def mlp(self, x, at):
        return self.linear(silu(self.linear(x, f"{at}.gate_proj")) * self.linear(x, f"{at}.up_proj"), f"{at}.down_proj")

    def feed_forward(self, x, at):
        c = self.c
        if f"{at}.gate.weight" not in self.w:
            return self.mlp(x, at)
        if self.delta:
            out = sigmoid(self.linear(x, f"{at}.shared_expert_gate")) * self.mlp(x, f"{at}.shared_expert")
            for row, score in enumerate(softmax(self.linear(x, f"{at}.gate"))):
                chosen = np.argsort(-score, kind="stable")[: c["num_experts_per_tok"]]
                for weight, expert in zip(score[chosen] / score[chosen].sum(), chosen):
                    out[row] += weight * self.mlp(x[row : row + 1], f"{at}.experts.{expert}")[0]
            return out
        scores = sigmoid(self.linear(x, f"{at}.gate"))
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
        read = self.normed(x, f"{at}.input_layernorm")
        has_state = f"{at}.linear_attn.A_log" in self.w
        x = x + (self.delta_rule(read, f"{at}.linear_attn") if has_state else self.attention(read, f"{at}.self_attn"))
        return x + self.feed_forward(self.normed(x, f"{at}.post_attention_layernorm"), f"{at}.mlp")

    def normed(self, x, name):
        return norm(x, self.w[f"{name}.weight"] + self.less, self.eps)

    def embed(self, tokens):
        return self.w["model.embed_tokens.weight"][tokens]

    def hidden(self, tokens):
        """The hidden states after the last norm."""
        x = self.embed(tokens)
        for index in range(self.c["num_hidden_layers"]):
            x = self.layer(x, f"model.layers.{index}")
        return self.normed(x, "model.norm")

    def logits(self, hidden):
        return hidden @ self.w["lm_head.weight"].T


# Names of a layer that predicts further tokens: norms of embedding and hidden state, projection,
# last norm. Those of Qwen are next to the layer.
USUAL = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def ahead(model: Model, at: str, names: tuple, hidden, following):
    """Logits of the tokens after `following`, and what stands for the hidden states at the next positions."""
    e, h, projection, last = (f"{own(at, names)}.{name}" for name in names)
    embedded = model.normed(model.embed(following), e)
    hidden = model.normed(hidden, h)
    pair = [hidden, embedded] if names is MIMO else [embedded, hidden]
    out = model.layer(model.linear(np.concatenate(pair, -1), projection), at)
    normed = model.normed(out, last)
    return model.logits(normed), out if names is USUAL else normed


def own(at: str, names: tuple) -> str:
    """What precedes the layer's own names."""
    return "mtp" if names is QWEN else at


def add_layer(name: str, config: dict, weights: dict) -> tuple:
    """Adds a layer like the last one, with other weights. Returns its place and the names of its own tensors."""
    number = config["num_hidden_layers"]
    at, names, like = (f"model.layers.{number}", USUAL, number - 1)
    if name == "mimo":
        at, names = "model.mtp_layers.0", MIMO
    if "linear_num_key_heads" in config:
        # Like the last layer with attention.
        at, names, like = "mtp.layers.0", QWEN, max(i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention")
    rng, before = fixture.generator(f"ahead-{name}"), f"model.layers.{like}."
    less = 1.0 if names is QWEN else 0.0
    for key in sorted(weights):
        if key.startswith(before):
            shape = weights[key].shape
            spread = 0.1 if len(shape) == 1 else 0.8 / np.sqrt(shape[-1]) / (2.0 if key.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
            middle = 1.0 - less if key.endswith("norm.weight") else 0.0
            weights[f"{at}.{key.removeprefix(before)}"] = middle + spread * rng.standard_normal(shape)
    width = config["hidden_size"]
    for key in (names[0], names[1], names[3]):
        weights[f"{own(at, names)}.{key}.weight"] = 1.0 - less + 0.1 * rng.standard_normal(width)
    weights[f"{own(at, names)}.{names[2]}.weight"] = rng.standard_normal((width, 2 * width)) * 0.8 / np.sqrt(2 * width)
    for key in [key for key in weights if key.startswith(own(at, names))]:
        stored = to_bf16(weights[key])
        weights[key] = (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(weights[key].shape)
    return at, names


def vllm_forward(path: Path):
    """The method `forward` of `Qwen3NextMultiTokenPredictor` in vLLM's file, without PyTorch."""
    kind = next(n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == "Qwen3NextMultiTokenPredictor")
    method = next(n for n in kind.body if getattr(n, "name", "") == "forward")
    method.returns = None
    for argument in method.args.args:
        argument.annotation = None
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    names = {"torch": SimpleNamespace(cat=lambda parts, dim: np.concatenate(parts, dim)), "get_pp_group": lambda: stage}
    exec(compile(ast.Module([method], []), str(path), "exec"), names)
    return names["forward"]


def compare_with_vllm(forward, model: Model, at: str, names: tuple, hidden, following):
    e, h, projection, last = (f"{own(at, names)}.{name}" for name in names)
    layer = lambda positions, hidden_states, residual: (model.layer(hidden_states, at), 0.0)
    predictor = SimpleNamespace(
        get_input_embeddings=model.embed,
        pre_fc_norm_embedding=lambda x: model.normed(x, e),
        pre_fc_norm_hidden=lambda x: model.normed(x, h),
        fc=lambda x: model.linear(x, projection),
        layers=[layer],
        num_mtp_layers=1,
        norm=lambda x, residual: (model.normed(x + residual, last), None),
    )
    theirs = forward(predictor, following, None, hidden)
    logits, chained = ahead(model, at, names, hidden, following)
    assert np.abs(theirs - chained).max() < 1e-9 and np.abs(model.logits(theirs) - logits).max() < 1e-9, "vLLM says something else"


def make(name: str, folder: Path, forward):
    base = HERE / "cases" / CASES[name]
    config, weights = json.loads((base / "config.json").read_text()), read(base / "model.safetensors")
    golden, model = read(base / "golden.safetensors"), Model(config, weights)
    for i in range(3):
        ours = model.logits(model.hidden(golden[f"tokens.{i}"]))[golden[f"positions.{i}"]]
        error = np.linalg.norm(ours - golden[f"logits.{i}"]) / np.linalg.norm(ours)
        assert error < 2e-5, f"{base.name}: {error:.1e} from the reference"
    at, names = add_layer(name, config, weights)
    if names is not QWEN:
        config["num_nextn_predict_layers"] = 1
    elif name != "qwen3_next":
        config["mtp_num_hidden_layers"] = 1
    if name == "mimo":
        config["model_type"] = "mimo"
    elif names is USUAL:
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
        if forward and names is QWEN:
            compare_with_vllm(forward, model, at, names, hidden[:-1], tokens[1:])
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
    parser.add_argument("--vllm", type=Path, help="vLLM's qwen3_next_mtp.py, to compare Qwen's layers with")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to make (all, if none is named)")
    args = parser.parse_args()
    for name in args.names or CASES:
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(name, folder, args.vllm and vllm_forward(args.vllm))


if __name__ == "__main__":
    main()
