"""The quantized folder as MLX-LM computes it, in f32, on the CPU."""

from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

ROWS = 16


class Reference:
    """Loads a folder with MLX-LM; scales, biases and norms are widened to f32, so that all arithmetic is f32."""

    def __init__(self, folder: Path):
        mx.set_default_device(mx.cpu)
        self.model, self.tokenizer = load(str(folder))
        widen = lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x
        self.model.update(tree_map(widen, self.model.parameters()))
        # The same numbers as dense matrices: MLX multiplies these many times faster on a CPU.
        self.model = dequantize_model(self.model)
        mx.eval(self.model.parameters())
        self.end = self.tokenizer.eos_token_id

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        turns = [{"role": role, "content": text} for role, text in messages]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)

    def answer_ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.end]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def greedy_gives(self, pairs: list[tuple[list[int], list[int]]]) -> list[bool]:
        """For each (prompt, answer): True if greedy decoding gives exactly this answer. That holds if each of its tokens is
        the most likely one after the tokens before it, which one pass over both shows."""
        results = [False] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        for at in range(0, len(order), ROWS):
            rows = order[at : at + ROWS]
            width = max(len(pairs[i][0]) + len(pairs[i][1]) for i in rows)
            ids = [pairs[i][0] + pairs[i][1] + [0] * (width - len(pairs[i][0]) - len(pairs[i][1])) for i in rows]
            best = mx.argmax(self.model(mx.array(ids)), axis=-1).tolist()
            for i, line in zip(rows, best):
                prompt, answer = pairs[i]
                results[i] = line[len(prompt) - 1 : len(prompt) - 1 + len(answer)] == answer
        return results

    def greedy(self, prompt: list[int], most: int = 96) -> list[int]:
        """Greedy continuation, the end-of-turn token included if it comes within `most` tokens."""
        cache = make_prompt_cache(self.model)
        ids: list[int] = []
        step = mx.array([prompt])
        while len(ids) < most:
            token = mx.argmax(self.model(step, cache=cache)[0, -1]).item()
            ids.append(token)
            if token == self.end:
                break
            step = mx.array([[token]])
        return ids

    def top_ids(self, ids: list[int]) -> list[int]:
        """The most likely next token at every position."""
        return mx.argmax(self.model(mx.array([ids]))[0], axis=-1).tolist()
