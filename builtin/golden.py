"""Writes golden.json: prompts as token ids and MLX's answers, for the engine's golden tests.

    python3 golden.py                    # reads model/, computes in f32 with MLX-LM on the CPU
"""

import json
from pathlib import Path

import corpus
from mlx_reference import Reference

HERE = Path(__file__).parent
SYSTEM = ("system", "You are a helpful assistant.")
# Entries whose first phrasing is asked; "!" marks those with the most likely token at every
# position.
ASKED = [
    "faster!", "machine-dies!", "what-is", "cmd-demo", "cmd-plan", "cmd-launch", "flag-split", "tensor-parallel!", "all-reduce",
    "uneven", "rdma", "uc-rc", "rdma-mac", "quantization", "kv-cache", "prefill-vs-decode", "top-p", "openai-compatible",
    "peer-lost", "exo", "hello",
]
OUTSIDE = ["What is the capital of France?", "Write a poem about autumn", "what is 17 plus 25"]


def main() -> None:
    reference = Reference(HERE / "model")
    entries = {e.id: e for e in corpus.load()}
    cases = [([("user", entries[name.rstrip("!")].asked[0])], name.endswith("!")) for name in ASKED]
    cases += [([("user", text)], text == OUTSIDE[0]) for text in OUTSIDE]
    first = entries["tensor-parallel"]
    cases.append(([SYSTEM, ("user", first.asked[0]), ("assistant", first.answer), ("user", "and pipeline?")], False))
    made = []
    for messages, every in cases:
        prompt = reference.prompt(messages)
        completion = reference.greedy(prompt)
        text = reference.tokenizer.decode([i for i in completion if i != reference.end])
        case = {
            "messages": [{"role": role, "content": content} for role, content in messages],
            "prompt": prompt, "completion": completion, "text": text,
        }
        if every:
            case["top"] = reference.top_ids(prompt + completion)
        made.append(case)
        print(f"{messages[-1][1]} => {text}")
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in made)
    (HERE / "golden.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
