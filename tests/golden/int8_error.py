#!/usr/bin/env python3
"""The error of int8 activations: the relative error of the golden logits, simulated in MLX.

    python3 tests/golden/int8_error.py FOLDER...      (folders of quantized cases, e.g. tests/golden/cases/llama-4bit-g64)

Every quantized linear's input, the head's too, is rounded with one symmetric scale per group of values along K (absmax /
127, to nearest); everything else stays f32. Prints ||l - l_ref|| / ||l_ref|| and the share of positions with the same argmax.
"""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cases import CASES
from fixture import prompts
from make import forward, load_f32


def round_to_int(x: mx.array, group: int, levels: int) -> mx.array:
    """x rounded to `levels` steps either side of zero, a scale per `group` values (0: per row)."""
    shape = x.shape
    x = x.reshape(*shape[:-1], -1, group or shape[-1])
    step = mx.maximum(mx.abs(x).max(-1, keepdims=True), 1e-20) / levels
    return (mx.round(x / step) * step).reshape(shape)


def main():
    plain = {cls: cls.__call__ for cls in (nn.QuantizedLinear,)}
    plain_head = nn.QuantizedEmbedding.as_linear
    for folder in map(Path, sys.argv[1:]):
        case = next(case for case in CASES if case.name == folder.name)
        model = load_f32(case, folder)
        vocab = case.config.get("text_config", case.config)["vocab_size"]
        references = [forward(case, model, tokens) for tokens in prompts(case.name, vocab)]
        reference = np.concatenate(references)
        for label, group, levels in (
            ("int8, one scale a row", 0, 127),
            ("int8, groups of 128", 128, 127),
            ("int8, groups of 64", 64, 127),
            ("int8, groups of 32", 32, 127),
            ("int8, groups of 16", 16, 127),
            ("int9, groups of 64", 64, 255),
            ("int16, groups of 64", 64, 32767),
        ):
            width = lambda x: group if x.shape[-1] % (group or 1) == 0 else 32
            call = plain[nn.QuantizedLinear]
            nn.QuantizedLinear.__call__ = lambda m, x: call(m, round_to_int(x, width(x), levels))
            nn.QuantizedEmbedding.as_linear = lambda m, x: plain_head(m, round_to_int(x, width(x), levels))
            logits = np.concatenate([forward(case, model, tokens) for tokens in prompts(case.name, vocab)])
            nn.QuantizedLinear.__call__, nn.QuantizedEmbedding.as_linear = call, plain_head
            error = np.linalg.norm(logits - reference) / np.linalg.norm(reference)
            same = (logits.argmax(-1) == reference.argmax(-1)).mean()
            print(f"{case.name:24} {label:24} relative error {error:.2e}   same argmax {same:6.1%}")


if __name__ == "__main__":
    main()
