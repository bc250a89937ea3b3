#!/usr/bin/env python3
"""Tokens per second of answers that follow a schema, compared with free ones of the same server and
the same number of tokens: the median over rounds of the ratio within a round.

    bench/structured.py MODEL [--rounds 15] [--tokens 160] [--clients 1,4] -- [OPTIONS of thunder serve]

THUNDER: the program (target/release/thunder). Free answers are not guessed either: the server has
--no-speculation. The machine should do nothing else.
"""
import argparse, statistics, tempfile

from served import Server, split_options

# An answer that does not end before its last token.
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["cpu", "gpu", "disk", "network"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 100000},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
        "ready": {"type": "boolean"},
    },
    "required": ["name", "kind", "count", "tags", "ready"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}
PROMPT = "A list of the parts of machine {}, as JSON:"


def main():
    own, options = split_options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=15, help="after one that does not count (15)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of an answer (160)")
    parser.add_argument("--clients", default="1,4", help="requests at once, one row for each number (1,4)")
    arguments = parser.parse_args(own)
    print("| clients | free, tokens/s | with a schema: times free (least, most) |\n|---|---|---|")
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        server = Server(arguments.model, [*options, "--no-speculation"], log)
        try:
            for clients in map(int, arguments.clients.split(",")):
                free, ratios = [], []
                for number in range(arguments.rounds + 1):
                    prompts = [PROMPT.format(number * clients + client) for client in range(clients)]
                    rates = {}
                    for with_schema in [False, True] if number % 2 else [True, False]:
                        fields = {"guided_json": SCHEMA} if with_schema else {}
                        rates[with_schema] = server.rate(prompts, arguments.tokens, temperature=0.8, seed=number, **fields)[1]
                    if number > 0:
                        free.append(rates[False])
                        ratios.append(rates[True] / rates[False])
                median = statistics.median(ratios)
                print(f"| {clients} | {statistics.median(free):.1f} | {median:.3f} ({min(ratios):.2f}, {max(ratios):.2f}) |", flush=True)
        finally:
            server.end()


main()
