#!/usr/bin/env python3
"""Tokens per second with drafts, compared with the same server without them: for each text, the
median over rounds of the ratio within a round. Prints a table for docs/performance.md.

    bench/speculation.py MODEL [--draft SMALL] [--rounds 9] [--tokens 160] [--clients 1] -- [OPTIONS]

One server without drafts (--no-speculation), one that guesses from the text, or by the model's own
layer if it has one, and with --draft one more. All run at once, and are asked in turn. OPTIONS are
those of `thunder serve`, e.g. --ranks 2 --threads 1. THUNDER: the program (target/release/thunder).
A model with right drafts can be made by `cargo run --release -p thunder-engine --example
drafted_models`. The machine should do nothing else.
"""
import argparse, statistics, tempfile

from served import Server, split_options

CODE = """fn total(items: &[Item]) -> u64 {
    let mut total = 0;
    for item in items {
        total += item.price * item.count;
    }
    total
}

fn largest(items: &[Item]) -> u64 {
    let mut largest = 0;
    for item in items {
        largest = largest.max(item.price);
    }
    largest
}
"""
# An edit: the file as it is, then the file with another name, which begins.
EDIT = f"Rename `items` to `rows` and change nothing else.\n\n{CODE}\n{CODE.replace('items', 'rows')}\n{CODE}\n{CODE[:40].replace('items', 'rows')}"
QUESTIONS = [
    "What does a rank do when another one is lost?",
    "Why is the first token slower than the others?",
    "How are the layers of a model divided among machines?",
    "When should a cluster have a second head?",
]
# A model that copies as larger models do: a grammar has it write the file with the other name.
FILE = CODE + CODE.replace("total", "weight").replace("largest", "heaviest").replace("price", "weight_kg")
COPY = f"Rename `items` to `rows` and change nothing else.\n\n{FILE}\n"
# Name, prompts (each round takes the next one), fields of the request.
TEXTS = [
    ("code edit", [EDIT], {"temperature": 0.0}),
    ("code edit that is copied", [COPY], {"temperature": 0.0, "guided_choice": [FILE.replace("items", "rows") * 2]}),
    ("questions, greedy", QUESTIONS, {"temperature": 0.0}),
    ("questions, temperature 0.8", QUESTIONS, {"temperature": 0.8}),
]


def main():
    own, options = split_options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--rounds", type=int, default=9, help="each text in each round, after one that does not count (9)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of an answer (160)")
    parser.add_argument("--clients", type=int, default=1, help="requests at once (1)")
    arguments = parser.parse_args(own)
    variants = {"plain": ["--no-speculation"], "default": []}
    if arguments.draft:
        variants["--draft"] = ["--draft", arguments.draft]
    servers = {}
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        try:
            for name, more in variants.items():
                servers[name] = Server(arguments.model, [*options, *more], log)
            measure(servers, arguments)
        finally:
            for server in servers.values():
                server.end()


def measure(servers, arguments):
    drafted = [name for name in servers if name != "plain"]
    print("| text | plain, tokens/s | " + " | ".join(f"{name}: times plain (least, most)" for name in drafted) + " |")
    print("|---" * (2 + len(drafted)) + "|")
    for text, prompts, fields in TEXTS:
        rates, differ = {name: [] for name in servers}, 0
        for number in range(arguments.rounds + 1):
            asked = [prompts[(number + client) % len(prompts)] for client in range(arguments.clients)]
            # The order changes: a machine that becomes slower slows all.
            order = sorted(servers, key=lambda name: (list(servers).index(name) + number) % len(servers))
            answers = {}
            for name in order:
                answers[name], rate = servers[name].rate(asked, arguments.tokens, seed=number + 1, **fields)
                if number > 0:
                    rates[name].append(rate)
            differ += any(answer != answers["plain"] for answer in answers.values())
        cells = [f"{statistics.median(rates['plain']):.1f}"]
        for name in drafted:
            ratios = [rate / plain for rate, plain in zip(rates[name], rates["plain"])]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})")
        note = f"; {differ} answers differ" if differ else ""
        print(f"| {text}{note} | " + " | ".join(cells) + " |", flush=True)
    for name in drafted:
        counts = servers[name].guesses()
        print(f"\n{name}: " + ", ".join(f"{key.removeprefix('vllm:spec_decode_num_')} {value:.0f}" for key, value in counts.items()))


main()
