#!/usr/bin/env python3
"""Makes the golden fixtures of low-rank adapters: folders as PEFT and MLX-LM write them, with random matrices, and the logits of PEFT's model (the base
model's layers in transformers, f32) with each.

    python3 tests/golden/make_adapters.py [--out DIR] [NAME...]

Needs PyTorch, transformers 5.23 and PEFT 0.21. The base models are folders of cases/; the weights of quantized ones are computed from their levels.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import fixture

CASES = Path(__file__).parent / "cases"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Base folder, PEFT's config, the tensors' type, and whether MLX-LM's form is written.
ADAPTERS = {
    "llama-all": ("llama-4bit-g32", {"r": 4, "lora_alpha": 8, "target_modules": ALL}, torch.float32, False),
    # Other targets, another rank in one module, a scale of its own; half the layers.
    "llama-some": (
        "llama-4bit-g32",
        {
            "r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True, "layers_to_transform": [1],
            "rank_pattern": {"down_proj": 7}, "alpha_pattern": {"self_attn.v_proj": 3},
        },
        torch.bfloat16,
        False,
    ),
    "llama-mlx": ("llama-4bit-g32", {"r": 4, "lora_alpha": 40, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}, torch.float32, True),
    # Norms of all queries and keys, norms after, 3 KV heads.
    "olmo2-all": ("transformers-olmo2", {"r": 5, "lora_alpha": 5, "target_modules": ALL}, torch.float16, False),
    # Projections that share a tensor.
    "phi3-fused": ("transformers-phi3", {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}, torch.float32, False),
}


def dequantized(folder):
    """The weights of a folder of MLX-LM's, 4 bits in groups of 32, in f32."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        scales = tensors.get(name.replace(".weight", ".scales"))
        if scales is None:
            weights[name] = tensor.float()
            continue
        words = tensor.view(torch.int32).numpy().view(np.uint32)
        levels = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
        levels = levels.reshape(words.shape[0], -1, 32).astype(np.float32)
        biases = tensors[name.replace(".weight", ".biases")]
        weight = levels * scales.float().numpy()[..., None] + biases.float().numpy()[..., None]
        weights[name] = torch.from_numpy(weight.reshape(words.shape[0], -1))
    return weights


def base_model(folder):
    config = json.loads((folder / "config.json").read_text())
    if config.pop("quantization", None) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config.pop("quantization_config")
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dequantized(folder), strict=False)
    assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)
    model.tie_weights()
    return model


def write_mlx(folder, settings):
    """Writes the adapter that PEFT has written as MLX-LM would."""
    path = folder / "adapter_model.safetensors"
    tensors, mlx = load_file(path), {}
    for name, tensor in tensors.items():
        name = name.removeprefix("base_model.model.")
        name = name.replace(".lora_A.weight", ".lora_a").replace(".lora_B.weight", ".lora_b")
        mlx[name] = ("F32", list(tensor.T.shape), tensor.T.contiguous().numpy().tobytes())
    fixture.write_safetensors(folder / "adapters.safetensors", mlx)
    path.unlink()
    parameters = {"rank": settings["r"], "scale": settings["lora_alpha"] / settings["r"], "dropout": 0.0, "keys": settings["target_modules"]}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make(name, case, folder):
    base, settings, dtype, is_mlx = case
    rng = fixture.generator(name)
    model = get_peft_model(base_model(CASES / base), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for key, value in sorted(model.named_parameters(), key=lambda pair: pair[0]):
            if "lora_" in key:
                # Changes of about a third of the weights'.
                gain = 0.3 if "lora_B" in key else 1.0
                random = torch.from_numpy(gain / np.sqrt(value.shape[-1]) * rng.standard_normal(tuple(value.shape)))
                value.copy_(random.to(dtype).to(value.dtype))
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    if dtype != torch.float32:
        types = {torch.bfloat16: "BF16", torch.float16: "F16"}
        tensors = load_file(folder / "adapter_model.safetensors")
        raw = {key: (types[dtype], list(value.shape), value.to(dtype).view(torch.int16).numpy().tobytes()) for key, value in tensors.items()}
        fixture.write_safetensors(folder / "adapter_model.safetensors", raw)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if is_mlx:
        write_mlx(folder, settings)

    def forward(tokens):
        with torch.no_grad():
            return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float().numpy()

    # The base case's prompts.
    return fixture.write_golden(base, model.config.vocab_size, forward, folder)


if __name__ == "__main__":
    import sys

    if "--out" not in sys.argv:
        sys.argv[1:1] = ["--out", str(Path(__file__).parent / "adapters")]
    fixture.main(__doc__, {name: (name, partial(make, name, case)) for name, case in ADAPTERS.items()})
