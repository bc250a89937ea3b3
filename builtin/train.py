"""Trains the built-in model. See README.md for how to run it and what it writes.

    python3 train.py --out build                      # a GPU, some minutes
    python3 train.py --out build --steps 3 --pool 2000 --threads 2 --no-report   # does it run at all (CPU)?
"""

import argparse
import json
import math
import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import corpus
import tokenizer
from qwen3 import Qwen3

BUCKETS = [96, 160, 256, 416]  # padded lengths; a longer dialogue is left out
TOKENS_PER_STEP = 36864
AUX_WEIGHT = 0.3


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="folder for the unquantized model and report.json")
    p.add_argument("--hidden", type=int, default=384)
    p.add_argument("--intermediate", type=int, default=1024)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--decay", type=float, default=0.1, help="weight decay")
    p.add_argument("--steps", type=int, default=6000)
    p.add_argument("--max-seconds", type=float, default=1e9, help="shorten the schedule to end by then")
    p.add_argument("--pool", type=int, default=500_000, help="dialogues drawn before training")
    p.add_argument("--threads", type=int, default=12, help="processes that draw dialogues")
    p.add_argument("--no-report", action="store_true", help="do not answer the evaluation's questions at the end")
    p.add_argument("--seed", type=int, default=1)
    return p.parse_args()


def config(a: argparse.Namespace) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": tokenizer.VOCAB,
        "hidden_size": a.hidden, "intermediate_size": a.intermediate, "num_hidden_layers": a.layers,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
        "tie_word_embeddings": True, "use_sliding_window": False, "torch_dtype": "bfloat16",
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    }


def draw(job: tuple[int, int, str]) -> list[tuple[np.ndarray, np.ndarray, int, int]]:
    """`count` dialogues: ids, which ids are learned, where the last answer begins, its entry."""
    seed, count, path = job
    augment = corpus.Augmenter(corpus.load(), seed)
    encode = tokenizer.Encoder(Path(path), dropout=0.1)
    made = []
    for _ in range(count):
        ids: list[int] = []
        learn: list[int] = []
        begin = entry = 0
        for role, text, index in augment.dialogue():
            part = encode.turn(role, text, loose=role == "user" and augment.rng.random() < 0.4)
            head = len(encode.opening()) if index is not None else len(part)
            if index is not None:
                begin, entry = len(ids) + head, index
            learn += [0] * head + [1] * (len(part) - head)
            ids += part
        if len(ids) <= BUCKETS[-1]:
            made.append((np.array(ids, np.int16), np.array(learn, np.int8), begin, entry))
    return made


def pool(a: argparse.Namespace, path: Path, device: str) -> list[tuple[torch.Tensor, ...]]:
    """All training dialogues, in one tensor per bucket: ids, learn, begin, entry."""
    jobs = [(a.seed * 100_003 + i, 2000, str(path)) for i in range(a.pool // 2000)]
    with multiprocessing.get_context("spawn").Pool(a.threads) as workers:
        made = [sample for part in workers.map(draw, jobs) for sample in part]
    buckets = []
    for low, high in zip([0, *BUCKETS], BUCKETS):
        inside = [s for s in made if low < len(s[0]) <= high]
        if not inside:
            continue
        ids = np.zeros((len(inside), high), np.int16)
        learn = np.zeros((len(inside), high), np.int8)
        for row, (words, mask, _, _) in enumerate(inside):
            ids[row, : len(words)], learn[row, : len(words)] = words, mask
        begin = np.array([s[2] for s in inside])
        entry = np.array([s[3] for s in inside])
        buckets.append(tuple(torch.from_numpy(x).to(device) for x in (ids, learn, begin, entry)))
    return buckets


def train(a: argparse.Namespace, c: dict, buckets: list, classes: int, device: str) -> Qwen3:
    """Returns the model with the moving average of its weights."""
    model = Qwen3(c, a.dropout).to(device)
    # Predicts the entry from the state before the answer's first token; dropped after training.
    judge = torch.nn.Linear(c["hidden_size"], classes).to(device)
    every = [*model.parameters(), *judge.parameters()]
    groups = [
        {"params": [p for p in every if p.dim() == 2], "weight_decay": a.decay},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.98), fused=device == "cuda")
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    shares = [float(b[0].numel()) for b in buckets]
    rng = random.Random(a.seed)
    began = time.time()
    step = 0
    while (done := max(step / a.steps, (time.time() - began) / a.max_seconds)) < 1:
        rate = a.lr * min(1.0, (step + 1) / 300) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, learn, begin, entry = rng.choices(buckets, shares)[0]
        rows = torch.randint(len(ids), (max(1, TOKENS_PER_STEP // ids.shape[1]),), device=device)
        x, mask, begin, entry = ids[rows].long(), learn[rows].bool(), begin[rows], entry[rows]
        with torch.autocast(device, torch.bfloat16):
            hidden = model(x)
            wanted = mask[:, 1:]
            loss = F.cross_entropy(model.logits(hidden[:, :-1][wanted]).float(), x[:, 1:][wanted])
            at = hidden[torch.arange(len(rows), device=device), begin - 1]
            aux = F.cross_entropy(judge(at).float(), entry, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        (loss + AUX_WEIGHT * aux).backward()
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        optimizer.step()
        keep = min(0.999, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.values()), [p.detach() for p in model.parameters()], 1 - keep)
        if step % 500 == 0:
            print(f"{a.out} step {step} loss {loss.item():.4f} aux {aux.item():.3f} at {time.time() - began:.0f} s", flush=True)
        step += 1
    print(f"{a.out} {step} steps in {time.time() - began:.0f} s", flush=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(average[name].to(torch.bfloat16).float())  # evaluated as it will be stored
    return model.eval()


@torch.no_grad()
def answers(model: Qwen3, encode: tokenizer.Encoder, prompts: list[list[int]], device: str, most: int = 150) -> list[str]:
    """Greedy continuations, all in one batch; recomputed at each step, which a model of this size can afford."""
    texts: list[str] = []
    for at in range(0, len(prompts), 512):
        part = prompts[at : at + 512]
        lengths = torch.tensor([len(p) for p in part], device=device)
        ids = torch.zeros(len(part), max(map(len, part)) + most, dtype=torch.long, device=device)
        for row, prompt in enumerate(part):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        rows = torch.arange(len(part), device=device)
        open_ = torch.ones(len(part), dtype=torch.bool, device=device)
        ends = lengths.clone()
        while open_.any() and int(ends.max()) < ids.shape[1]:
            with torch.autocast(device, torch.bfloat16):
                token = model.logits(model(ids[:, : int(ends.max())])[rows, ends - 1]).argmax(-1)
            open_ &= token != encode.end
            ids[rows[open_], ends[open_]] = token[open_]
            ends[open_] += 1
        for row, prompt in enumerate(part):
            texts.append(encode.exact.decode(ids[row, len(prompt) : int(ends[row])].tolist()))
    return texts


def report(model: Qwen3, encode: tokenizer.Encoder, entries: list, device: str) -> dict:
    """Shares of exact answers by set, and the wrong answers to held-out phrasings."""
    from evaluate import score, sets

    result: dict = {}
    for name, cases in sets(entries).items():
        prompts = [[i for role, text in case.messages for i in encode.turn(role, text)] + encode.opening() for case in cases]
        result[name] = score(cases, answers(model, encode, prompts, device))
    return result


def main() -> None:
    a = arguments()
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a.out.mkdir(parents=True, exist_ok=True)
    entries = corpus.load()
    path = a.out / "tokenizer.json"
    tokenizer.build(entries, path)
    c = config(a)
    buckets = pool(a, path, device)
    print(f"{sum(len(b[0]) for b in buckets)} dialogues of {len(entries)} entries", flush=True)
    model = train(a, c, buckets, len(entries), device)
    weights = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in model.named_parameters()}
    print(f"{sum(w.numel() for w in weights.values())} parameters")
    save_file(weights, a.out / "model.safetensors", metadata={"format": "pt"})
    (a.out / "config.json").write_text(json.dumps(c, indent=2) + "\n")
    (a.out / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": c["eos_token_id"], "pad_token_id": c["pad_token_id"]}, indent=2) + "\n"
    )
    (a.out / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "model_max_length": 2048, "clean_up_tokenization_spaces": False, "add_prefix_space": False,
        }, indent=2) + "\n"
    )
    (a.out / "chat_template.jinja").write_text(tokenizer.TEMPLATE)
    if a.no_report:
        return
    result = report(model, tokenizer.Encoder(path), entries, device)
    (a.out / "report.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(a.out, json.dumps({k: {x: y for x, y in v.items() if x != "wrong"} for k, v in result.items()}))


if __name__ == "__main__":
    main()
