#!/usr/bin/env python3
"""Makes the golden fixtures of encoders: folders as transformers writes them, with random weights, and what transformers computes for them in f32.

    python3 tests/golden/make_encoders.py [--out DIR] [NAME...]

Needs PyTorch and transformers 5.17. README.md says what is in the files.
"""

from functools import partial

import numpy as np
import torch
import transformers

import fixture

LENGTHS = (2, 40, 70)
SMALL = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 80, "vocab_size": 163, "max_position_embeddings": 80,
}
BERT = {**SMALL, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
# Positions begin at 2.
ROBERTA = {**SMALL, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 82, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
MODERN = {**SMALL, "local_attention": 16, "global_attn_every_n_layers": 2, "pad_token_id": 3, "cls_token_id": 1, "sep_token_id": 2}
GEMMA = {
    **SMALL, "head_dim": 16, "num_key_value_heads": 1, "use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
}
CASES = {
    "bert": ("BertModel", BERT, torch.float32),
    "bert-rerank": ("BertForSequenceClassification", {**BERT, "num_labels": 1}, torch.bfloat16),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA, torch.float16),
    "xlm-roberta-rerank": ("XLMRobertaForSequenceClassification", {**ROBERTA, "num_labels": 1}, torch.float32),
    "modernbert": ("ModernBertModel", MODERN, torch.bfloat16),
    "embedding-gemma": ("Gemma3TextModel", GEMMA, torch.bfloat16),
}


def weight(rng, name, shape):
    if "norm" in name.lower():
        return 0.2 * rng.standard_normal(shape) + (0.0 if name.endswith("bias") else 1.0)
    if name.endswith("bias"):
        return 0.3 * rng.standard_normal(shape)
    return (0.8 if "embed" in name else 1.5 / np.sqrt(shape[-1])) * rng.standard_normal(shape)


def make(name, folder):
    class_name, settings, dtype = CASES[name]
    rng, build = fixture.generator(name), getattr(transformers, class_name)
    config = build.config_class(**settings)
    config._attn_implementation = "eager"
    model = build(config)
    less_one = class_name.startswith("Gemma")
    with torch.no_grad():
        for key, value in sorted(model.named_parameters(), key=lambda pair: pair[0]):
            array = weight(rng, key, tuple(value.shape)) - (1.0 if less_one and "norm" in key else 0.0)
            value.copy_(torch.from_numpy(array))
    model.to(dtype).save_pretrained(folder)
    model = build.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tensors, rerank = {}, class_name.endswith("Classification")
    for i, length in enumerate(LENGTHS):
        # 1 fills up batches for RoBERTa, and has no position.
        tokens = rng.integers(4, settings["vocab_size"], length).astype(np.int32)
        tokens[-1] = settings["vocab_size"] - 1
        types = (np.arange(length) >= length // 3).astype(np.int32) * (settings.get("type_vocab_size", 1) - 1)
        inputs = {"input_ids": torch.from_numpy(tokens.astype(np.int64))[None]}
        if "type_vocab_size" in settings:
            inputs["token_type_ids"] = torch.from_numpy(types.astype(np.int64))[None]
        with torch.no_grad():
            given = model(**inputs, output_hidden_states=True)
        hidden = given.hidden_states[-1] if rerank else given.last_hidden_state
        arrays = {"tokens": tokens, "types": types, "hidden": hidden[0].numpy()}
        if rerank:
            arrays["scores"] = given.logits[0].numpy()
        for key, array in arrays.items():
            kind = {"float32": "F32", "int32": "I32"}[str(array.dtype)]
            tensors[f"{key}.{i}"] = (kind, array.shape, np.ascontiguousarray(array).tobytes())
    fixture.write_safetensors(folder / "golden.safetensors", tensors)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return float(hidden.std())


if __name__ == "__main__":
    fixture.main(__doc__, {name: (f"../encoders/{name}", partial(make, name)) for name in CASES})
