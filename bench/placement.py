#!/usr/bin/env python3
"""Predicted against measured: `thunder cluster plan` on nodes with cores of their own.

    sudo bench/placement.py PROGRAM MODEL... > table.md                 # network namespaces, three cables
    bench/placement.py --loopback PROGRAM MODEL... > table.md           # without root; the cable is shared memory

Nodes are `thunder up` on cores of this machine: `--cores 0-3,4-7,8-9` makes ant, bee and cat. For each model: one node
alone (the fastest and the slowest), tensor parallel, pipeline and both on the first two and on all, with the shares
that the plan gives, with those of --split, and with --replicas two groups with 16 requests at a time. In namespaces,
`tc` limits what a cable takes, and with --delay-ms netem delays each packet, where the kernel has it. Prints a table in
Markdown and how many predictions are within 20 %; with --limit-s, of those that were measured until then. Nothing else
should run.
"""

import argparse
import json
import os
import statistics
import sys
import time

from desk import cluster, desk, infer, throughput

CABLES = {"veth": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
BEGAN = time.monotonic()
# A plan is for an answer after a prompt of 1000 tokens.
PROMPT = " ".join(f"word{number}" for number in range(250))
TOKENS = 32
# Several answers at a time, as the plan counts them.
CLIENTS, BATCH_PROMPT, BATCH_TOKENS = 16, 250, 100
ROUNDS = 2
# A slow layout gets one round.
LONG_S = 5


def ranges(text):
    """`0-3,8` as two sets of cores."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [range(part[0], part[-1] + 1) for part in ends]


def measure(node, model):
    """Tokens a second of decode, the best of some rounds: what others take is not the machine's speed."""
    infer(node, model, "Count.", 8)
    rates = []
    for number in range(ROUNDS):
        began = time.monotonic()
        # Another beginning each time, so that the prefix cache has nothing of it.
        said = infer(node, model, f"{number} {PROMPT}", TOKENS)
        rates.append((said["tokens"] - 1) / (said["seconds"] - said["first_token_s"]))
        if time.monotonic() - began > LONG_S:
            break
    return max(rates)


def chosen(layouts, names):
    """The layouts to measure: one group each."""
    single = [layout for layout in layouts if len(layout["groups"]) == 1 and not layout["why_not"]]
    group = lambda layout: layout["groups"][0]
    alone = [layout for layout in single if len(group(layout)["nodes"]) == 1]
    alone.sort(key=lambda layout: -layout["decode_tokens_s"])
    found = alone[:1] + (alone[-1:] if len(names) > 2 else [])
    for count in sorted({2, len(names)}):
        for stages in range(1, count + 1):
            nodes = set(range(count))
            fits = [layout for layout in single if set(group(layout)["nodes"]) == nodes
                    and group(layout)["stages"] == stages]
            found += fits[:1]
    return found


def planned(node, model, *words):
    return json.loads(node.thunder("cluster", "plan", model, "--json", *words))


def same(layout, layouts):
    """The layout of a later plan on the same nodes in the same stages; its shares may differ."""
    key = lambda layout: [(group["stages"], sorted(group["nodes"])) for group in layout["groups"]]
    return next(other for other in layouts if key(other) == key(layout))


def words_of(layout, names):
    if len(layout["groups"]) > 1:
        return ["--replicas", str(len(layout["groups"])), "--", "--no-speculation"]
    group = layout["groups"][0]
    shares = ",".join(f"{names[node]}={weight}" for node, weight in zip(group["nodes"], group["weights"]))
    where = ["--split", shares] if len(group["nodes"]) > 1 else ["--nodes", names[group["nodes"][0]]]
    stages = [] if group["stages"] == 1 else ["--stages", str(group["stages"])]
    # Random weights repeat themselves, and guessing would be measured.
    return [*where, "--", "--no-speculation", *stages]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--cores", type=ranges, default=ranges("0,1"), help="cores of each node, e.g. 0-3,4-7,8-9")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--delay-ms", type=float)
    parser.add_argument("--split", action="append", default=[], help="shares to measure too, e.g. ant=3,bee=1")
    parser.add_argument("--only-split", action="store_true", help="only the shares of --split")
    parser.add_argument("--replicas", action="store_true", help="only two replicas")
    parser.add_argument("--stages", type=int, help="only layouts with this number of stages")
    parser.add_argument("--size", type=int, help="only layouts of this number of nodes")
    parser.add_argument("--burst", default="256k", help="bytes that tc lets pass before it limits a cable [default: 256k]")
    parser.add_argument("--again", action="store_true", help="measure nodes and links again before each layout, on "
                        "machines whose speed changes with other guests")
    parser.add_argument("--cable", choices=CABLES, help="only this one")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no layout after this time")
    options = parser.parse_args()
    nodes, switch = desk(options.program, options.cores, options.loopback)
    ant, errors = nodes[0], []
    plan = {"nodes": []}

    def row(model, cable, layout, names):
        several = len(layout["groups"]) > 1
        predicted = layout["batch_tokens_s" if several else "decode_tokens_s"]
        short = os.path.basename(model.rstrip("/"))
        try:
            ant.thunder("model", "load", model, *words_of(layout, names))
            if several:
                measured = throughput(ant, model, CLIENTS, BATCH_PROMPT, BATCH_TOKENS)
            else:
                measured = measure(ant, model)
        except SystemExit as failure:
            print(f"| {short} | {cable} | {layout['name']} | {predicted:.1f} | failed: {failure} | |", flush=True)
            return
        finally:
            ant.thunder("model", "unload", model, check=False)
        errors.append(abs(predicted / measured - 1))
        print(f"| {short} | {cable} | {layout['name']} | {predicted:.1f} | {measured:.1f} "
              f"| {predicted / measured - 1:+.0%} |", flush=True)

    try:
        cluster(nodes)
        print("| model | cable | layout | predicted tokens/s | measured | error |")
        print("|---|---|---|---|---|---|", flush=True)
        cables = {name: rate for name, rate in CABLES.items() if options.cable in (None, name)}
        for cable, rate in {"shared memory": None}.items() if options.loopback else cables.items():
            for node in [] if options.loopback else nodes:
                node.sh("tc qdisc del dev eth0 root 2>/dev/null || true")
                if rate:
                    node.sh(f"tc qdisc add dev eth0 root handle 1: tbf rate {rate} burst {options.burst} latency 20ms")
                elif options.delay_ms:
                    node.sh(f"tc qdisc add dev eth0 root netem delay {options.delay_ms}ms")
            if time.monotonic() - BEGAN > options.limit_s:
                break
            ant.thunder("stats", "--network", "--json")
            links = [{key: link[key] for key in ("from", "to", "latency_us", "bytes_s", "ranks")}
                     for link in ant.status()["links"]]
            print(f"{cable}: {json.dumps(links)}", file=sys.stderr)
            for model in options.models:
                plan = planned(ant, model, "--replicas", "1")
                names = [node["name"] for node in plan["nodes"]]
                own = [] if options.only_split else chosen(plan["layouts"], names)
                layouts = [(layout, ["--replicas", "1"]) for layout in own]
                for split in options.split:
                    of_split = planned(ant, model, "--split", split)["layouts"]
                    layouts += [(layout, ["--split", split]) for layout in of_split]
                if options.replicas:
                    of_two = planned(ant, model, "--replicas", "2")["layouts"]
                    layouts = [(layout, ["--replicas", "2"]) for layout in of_two]
                for layout, words in layouts:
                    group = layout["groups"][0]
                    if options.stages not in (None, group["stages"]) or options.size not in (None, len(group["nodes"])):
                        continue
                    if rate and len(group["nodes"]) == 1:
                        continue
                    if time.monotonic() - BEGAN < options.limit_s:
                        if options.again:
                            plan = planned(ant, model, *words, "--again")
                            layout = same(layout, plan["layouts"])
                        row(model, cable, layout, names)
        speeds = [{key: node[key] for key in ("name", "speed", "together")} for node in plan["nodes"]]
        print("\nspeeds: " + json.dumps(speeds))
        within = sum(error <= 0.2 for error in errors)
        median = f", median error {statistics.median(errors):.0%}" if errors else ""
        print(f"\n{within} of {len(errors)} within 20 %{median}, in {time.monotonic() - BEGAN:.0f} s.")
    finally:
        for node in nodes:
            node.end()
        if switch:
            switch.terminate()


if __name__ == "__main__":
    sys.exit(main())
