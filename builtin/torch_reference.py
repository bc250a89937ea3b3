"""The quantized folder computed in f32 by PyTorch: the same numbers as MLX's, fast enough for all questions on a CPU."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

import tokenizer
from qwen3 import Qwen3

ROWS = 64


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in f32; 8-bit affine groups become q * scale + bias."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        raw = {name: file.get_tensor(name) for name in file.keys()}
    made = {}
    for name, x in raw.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{path}.scales" in raw:
            scale, bias = raw[f"{path}.scales"].float(), raw[f"{path}.biases"].float()
            q = x.view(torch.uint8).float().view(*scale.shape, -1)
            x = (q * scale[..., None] + bias[..., None]).flatten(1)
        made[name] = x.float()
    return made


class Reference:
    """Has the methods of mlx_reference.Reference that evaluate.py needs."""

    def __init__(self, folder: Path):
        self.model = Qwen3(json.loads((folder / "config.json").read_text())).eval()
        self.model.load_state_dict(dequantized(folder))
        self.encode = tokenizer.Encoder(folder / "tokenizer.json")

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        return [i for role, text in messages for i in self.encode.turn(role, text)] + self.encode.opening()

    def answer_ids(self, text: str) -> list[int]:
        return [*self.encode.ids(text), self.encode.end]

    def decode(self, ids: list[int]) -> str:
        return self.encode.exact.decode(ids)

    @torch.no_grad()
    def greedy_gives(self, pairs: list[tuple[list[int], list[int]]]) -> list[bool]:
        results = [False] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        for at in range(0, len(order), ROWS):
            rows = order[at : at + ROWS]
            width = max(len(pairs[i][0]) + len(pairs[i][1]) for i in rows)
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            for row, i in enumerate(rows):
                line = pairs[i][0] + pairs[i][1]
                ids[row, : len(line)] = torch.tensor(line)
            hidden = self.model(ids)
            for row, i in enumerate(rows):
                prompt, answer = pairs[i]
                span = hidden[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)]
                results[i] = self.model.logits(span).argmax(-1).tolist() == answer
        return results

    @torch.no_grad()
    def greedy(self, prompt: list[int], most: int = 96) -> list[int]:
        ids = list(prompt)
        while len(ids) < len(prompt) + most:
            ids.append(self.model.logits(self.model(torch.tensor([ids]))[0, -1]).argmax().item())
            if ids[-1] == self.encode.end:
                break
        return ids[len(prompt) :]
