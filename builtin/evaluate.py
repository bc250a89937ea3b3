"""Measures how often the built-in model answers correctly, on the quantized folder.

    python3 evaluate.py                           # all questions, dequantized weights in PyTorch on the CPU
    python3 evaluate.py --with mlx --sample 20    # MLX-LM itself, which takes seconds a question on a CPU
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import corpus

HERE = Path(__file__).parent


@dataclass
class Case:
    """A conversation that ends with a question, and its expected answer."""

    messages: list[tuple[str, str]]
    entry: str
    answer: str
    out_of_scope: bool


def sets(entries: list[corpus.Entry]) -> dict[str, list[Case]]:
    """Sets of questions by name: held-out phrasings plain, behind other turns and a system prompt; trained ones; out of scope."""
    rng = random.Random(5)
    known = [e for e in entries if not e.out_of_scope]
    by_id = {e.id: e for e in entries}

    def case(e: corpus.Entry, text: str, before: list[tuple[str, str]] = []) -> Case:
        return Case([*before, ("user", text)], e.id, e.answer, e.out_of_scope)

    def past() -> list[tuple[str, str]]:
        turns = []
        for _ in range(rng.choice([1, 2])):
            e = rng.choice(entries)
            turns += [("user", corpus.Augmenter([e], rng.randrange(10**6)).fill(rng.choice(e.asked), e.lists)), ("assistant", e.answer)]
        return turns

    held = [(e, text) for e in known for text in e.held]
    hard = [(e, text) for e in known for text in e.hard]
    outside = [(e, text) for e in entries if e.out_of_scope for text in e.held]
    follow = [(e, parent, text) for e in entries for parent, text in e.follow]
    system = [("system", corpus.HELD_SYSTEM_PROMPTS[0])], [("system", corpus.HELD_SYSTEM_PROMPTS[1])]
    return {
        "held_out": [case(e, t) for e, t in held],
        "held_out_after_turns": [case(e, t, past()) for e, t in held],
        "held_out_with_system_prompt": [case(e, t, rng.choice(system)) for e, t in held],
        "held_out_hard": [case(e, t) for e, t in hard],
        "trained": [case(e, t) for e in known for t in e.asked],
        "follow_ups": [
            case(e, t, [("user", by_id[p].asked[0]), ("assistant", by_id[p].answer)]) for e, p, t in follow
        ],
        "out_of_scope_held_out": [case(e, t) for e, t in outside],
        "out_of_scope_after_turns": [case(e, t, past()) for e, t in outside],
    }


def score(cases: list[Case], texts: list[str]) -> dict:
    """Shares of exact answers, and of questions recognised as inside or outside of what the model knows."""
    refusals = {" ".join(e.answer.split()) for e in corpus.load() if e.out_of_scope}
    exact = scope = 0
    wrong = []
    for case, text in zip(cases, texts):
        text = " ".join(text.split())
        right = text == " ".join(case.answer.split())
        exact += right
        scope += (text in refusals) == case.out_of_scope
        if not right:
            wrong.append(f"{case.entry}: {case.messages[-1][1]} => {text[:90]}")
    n = max(1, len(cases))
    return {"questions": len(cases), "exact": round(exact / n, 4), "scope_recognised": round(scope / n, 4), "wrong": wrong}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=HERE / "model")
    p.add_argument("--sample", type=int, default=0, help="questions of each set at most; 0: all")
    p.add_argument("--with", dest="engine", choices=["torch", "mlx"], default="torch")
    p.add_argument("--out", type=Path, default=HERE / "report.json")
    a = p.parse_args()
    if a.engine == "mlx":
        from mlx_reference import Reference
    else:
        from torch_reference import Reference

    reference = Reference(a.model)
    entries = corpus.load()
    result = {}
    for name, cases in sets(entries).items():
        if a.sample and len(cases) > a.sample:
            cases = random.Random(11).sample(cases, a.sample)
        prompts = [reference.prompt(case.messages) for case in cases]
        texts = []
        right = reference.greedy_gives([(p, reference.answer_ids(c.answer)) for p, c in zip(prompts, cases)])
        for prompt, case, fits in zip(prompts, cases, right):
            # Only wrong answers are decoded, to see whether scope was at least recognised.
            if fits:
                texts.append(case.answer)
                continue
            ids = reference.greedy(prompt, len(reference.answer_ids(case.answer)) + 90)
            texts.append(reference.decode(ids).removesuffix("<|im_end|>"))
        result[name] = score(cases, texts)
        shown = result[name]
        print(f"{name:30} {shown['questions']:5} questions  exact {shown['exact']:.1%}  scope {shown['scope_recognised']:.1%}", flush=True)
    a.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
