#!/usr/bin/env python3
"""Predicted against measured: `thunder cluster plan` on nodes with cores of their own.

    sudo bench/placement.py PROGRAM MODEL --out runs.jsonl             # network namespaces
    bench/placement.py --loopback PROGRAM MODEL --out runs.jsonl       # without root; the cable is shared memory
    bench/placement.py --summary runs.jsonl...                         # tables in Markdown

Nodes are `thunder up` on cores of this machine: `--cores 0-3,4-7` makes ant and bee. What a machine's memory gives may
change with other guests of its host, so nodes and links are measured before and after each layout (with --block N,
each N layouts), and a prediction is the mean of what both measurements give. Each layout is run in --passes passes over
all of them; its error is the median of the passes' errors. A pass counts only whole: a layout that fails is reported.

A layout is written as its shares, with stages after a slash: `ant=2,bee=1`, `ant=1,bee=1/2`; `x2` is two replicas, with
16 requests at a time. In namespaces, `tc` limits what a cable takes (--cable). Nothing else should run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback

from desk import cluster, desk, infer, throughput

CABLES = {"veth": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
BEGAN = time.monotonic()
# A plan is for an answer after a prompt of 1000 tokens. `thunder model synth` has one for a byte.
PROMPT = "word " * 200
TOKENS, ROUNDS = 48, 3
# Several answers at a time, as the plan counts them.
CLIENTS, BATCH_PROMPT, BATCH_TOKENS = 16, 250, 100
# What is far off is measured by the same number of passes as the rest.
GOAL = 0.2
TWO = ["ant=1", "ant=1,bee=1", "ant=2,bee=1", "ant=1,bee=1/2", "ant=2,bee=1/2", "x2"]
# By their number of nodes.
LAYOUTS = {
    1: ["ant=1"],
    2: TWO,
    3: [*TWO, "ant=1,bee=1,cat=1", "ant=3,bee=2,cat=1", "ant=1,bee=1,cat=1/3"],
    4: ["ant=1", "ant=1,bee=1", "ant=1,bee=1,cat=1", "ant=1,bee=1,cat=1,dog=1", "ant=1,bee=1/2",
        "ant=1,bee=1,cat=1,dog=1/4", "ant=1,bee=1,cat=1,dog=1/2", "ant=2,bee=1", "ant=3,bee=2,cat=1",
        "ant=4,bee=3,cat=2,dog=1", "ant=2,bee=1/2", "ant=2,bee=2,cat=1,dog=1/2", "x2", "x4", "ant=1,bee=1,cat=1/3"],
}


def ranges(text):
    """`0-3,8` as two sets of cores; `0-1+4-5,8` if the first has four."""
    def cores(part):
        ends = [int(end) for end in part.split("-")]
        return range(ends[0], ends[-1] + 1)
    return [[core for part in own.split("+") for core in cores(part)] for own in text.split(",")]


def parts(layout):
    """Shares and stages of a layout, or None and the number of replicas."""
    if layout[0] == "x":
        return None, int(layout[1:])
    shares, _, stages = layout.partition("/")
    return shares, int(stages or 1)


def planned(node, model, *words):
    return json.loads(node.thunder("cluster", "plan", model, "--json", *words))


def predicted(node, model, layout):
    """Tokens a second that the plan predicts, of one answer or, with replicas, of 16 at a time."""
    shares, count = parts(layout)
    if not shares:
        return planned(node, model, "--replicas", str(count))["layouts"][0]["batch_tokens_s"]
    layouts = planned(node, model, "--split", shares)["layouts"]
    return next(found["decode_tokens_s"] for found in layouts if found["groups"][0]["stages"] == count)


def load(node, model, layout):
    shares, count = parts(layout)
    where = ["--split", shares] if shares else ["--replicas", str(count)]
    stages = ["--stages", str(count)] if shares and count > 1 else []
    # Random weights repeat themselves, and guessing would be measured.
    node.thunder("model", "load", model, *where, "--", "--no-speculation", *stages)


def measured(node, model, layout):
    """Tokens a second of decode, the median of some rounds, with the time that the prompt took; or of 16 at a time."""
    if not parts(layout)[0]:
        return {"tokens_s": throughput(node, model, CLIENTS, BATCH_PROMPT, BATCH_TOKENS)}
    # Later rounds find the prompt in the cache.
    said = [infer(node, model, PROMPT, TOKENS) for _ in range(ROUNDS)]
    rates = [(one["tokens"] - 1) / (one["seconds"] - one["first_token_s"]) for one in said]
    return {"tokens_s": statistics.median(rates), "rounds": rates, "first_token_s": said[0]["first_token_s"]}


def set_cable(nodes, cable, burst):
    for node in nodes:
        node.sh("tc qdisc del dev eth0 root 2>/dev/null || true")
        if CABLES[cable]:
            node.sh(f"tc qdisc add dev eth0 root handle 1: tbf rate {CABLES[cable]} burst {burst} latency 20ms")


def attempt(what, do):
    """What a step gives, or None and its failure: the others go on."""
    try:
        return do(), None
    except (SystemExit, Exception) as failure:  # pylint: disable=broad-except
        print(f"{what}: {failure}", file=sys.stderr, flush=True)
        if not isinstance(failure, SystemExit):
            traceback.print_exc()
        return None, str(failure)


class Bench:
    """A series of layouts on the nodes of a desk."""

    def __init__(self, options, nodes, keep):
        self.options, self.nodes, self.node, self.keep = options, nodes, nodes[0], keep
        self.model = options.model

    def speeds(self, layouts):
        """Measures nodes and links, and predicts these layouts."""
        began = time.monotonic()
        # Headers are enough for this, and links are measured too.
        plan, why = attempt("measuring", lambda: planned(self.node, self.model, "--split", "ant=1", "--again"))
        if plan is None:
            return {"failed": why, "predicted": {}}
        figures = {name: attempt(name, lambda name=name: predicted(self.node, self.model, name))[0] for name in layouts}
        nodes = [{key: node[key] for key in ("name", "speed", "together")} for node in plan["nodes"]]
        links = [{key: link[key] for key in ("from", "to", "latency_us", "bytes_s", "ranks")}
                 for link in self.node.status()["links"]]
        return {"predicted": figures, "nodes": nodes, "links": links, "took_s": time.monotonic() - began}

    def run(self, layout):
        """Loads and measures one layout."""
        began = time.monotonic()
        try:
            _, why = attempt(f"loading {layout}", lambda: load(self.node, self.model, layout))
            figures = {} if why else attempt(layout, lambda: measured(self.node, self.model, layout))[0] or {}
        finally:
            self.node.thunder("model", "unload", self.model, check=False)
        return figures | {"took_s": time.monotonic() - began} | ({"failed": why} if why else {})

    def series(self, cable, layouts, number):
        """One pass over the layouts of a cable."""
        blocks = [layouts[at:at + self.options.block] for at in range(0, len(layouts), self.options.block)]
        before = self.speeds(blocks[0])
        for place, block in enumerate(blocks):
            runs = []
            for layout in block:
                if time.monotonic() - BEGAN < self.options.limit_s:
                    runs.append((layout, self.run(layout)))
            if not runs:
                return
            following = blocks[place + 1] if place + 1 < len(blocks) else []
            after = self.speeds(block + following)
            for layout, run in runs:
                guesses = [at["predicted"].get(layout) for at in (before, after)]
                self.keep({"cable": cable, "layout": layout, "pass": number, "predicted": guesses, "run": run,
                           "at_s": round(time.monotonic() - BEGAN)})
            self.keep({"cable": cable, "pass": number, "speeds": [before, after]})
            before = after


def row_of(cable, layout, runs):
    """A table's row of the passes of a layout, and its error; both None if no pass is whole."""
    whole = [run for run in runs if run["run"].get("tokens_s") and all(run["predicted"])]
    failed = len(runs) - len(whole)
    if not whole:
        return f"| {cable} | {layout} | | failed {failed} times | | |", None
    guesses = [statistics.mean(run["predicted"]) for run in whole]
    rates = [run["run"]["tokens_s"] for run in whole]
    errors = [guess / rate - 1 for guess, rate in zip(guesses, rates)]
    error = statistics.median(errors)
    list_of = lambda values, form: ", ".join(format(value, form) for value in values)
    note = f"; failed {failed} times" if failed else ""
    return (f"| {cable} | {layout} | {list_of(guesses, '.1f')} | {list_of(rates, '.1f')}{note} "
            f"| {list_of(errors, '+.0%')} | {error:+.0%} |"), error


def summary(lines):
    """The table of all runs."""
    by_layout = {}
    for line in lines:
        if "layout" in line:
            by_layout.setdefault((line["cable"], line["layout"]), []).append(line)
    rows = ["| cable | layout | predicted tokens/s | measured | error of each pass | median |", "|---|---|---|---|---|---|"]
    errors = []
    for (cable, layout), runs in by_layout.items():
        row, error = row_of(cable, layout, runs)
        rows.append(row)
        errors += [] if error is None else [abs(error)]
    within = sum(error <= GOAL for error in errors)
    median = f", median error {statistics.median(errors):.0%}" if errors else ""
    return "\n".join([*rows, "", f"{within} of {len(errors)} within {GOAL:.0%}{median}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?")
    parser.add_argument("model", nargs="?", help="a folder, or the name of a shape to write first, as llama-1b")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="print the table of these runs, and run nothing")
    parser.add_argument("--out", help="file that gets a line of JSON for each run [default: none]")
    parser.add_argument("--cores", type=ranges, default=ranges("0,1"), help="cores of each node, e.g. 0-3,4-7,8-9")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--layouts", nargs="+", help="[default: by the number of nodes]")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--block", type=int, default=1, help="layouts between two measurements of the machine")
    parser.add_argument("--burst", default="256k", help="bytes that tc lets pass before it limits a cable [default: 256k]")
    parser.add_argument("--cable", choices=CABLES, default="veth")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no layout after this time")
    options = parser.parse_args()
    if options.summary:
        print(summary([json.loads(line) for name in options.summary for line in open(name)]))
        return
    nodes, switch = desk(options.program, options.cores, options.loopback)
    kept = []

    def keep(line):
        kept.append(line)
        if options.out:
            with open(options.out, "a") as file:
                print(json.dumps(line), file=file)
        if "layout" in line:
            print(row_of(line["cable"], line["layout"], [line])[0], file=sys.stderr, flush=True)

    if not os.path.exists(options.model):
        folder = os.path.join(nodes[0].folder, "model")
        subprocess.run([options.program, "model", "synth", "--arch", options.model, "--bits", "4", folder], check=True)
        options.model = folder
    cable = "shared memory" if options.loopback else options.cable
    try:
        if not options.loopback:
            set_cable(nodes, cable, options.burst)
        cluster(nodes)
        bench = Bench(options, nodes, keep)
        for number in range(options.passes):
            bench.series(cable, options.layouts or LAYOUTS[len(nodes)], number)
        print(summary(kept), flush=True)
        print(f"\nIn {time.monotonic() - BEGAN:.0f} s.")
    finally:
        for node in nodes:
            attempt("ending", node.end)
        if switch:
            switch.terminate()


if __name__ == "__main__":
    sys.exit(main())
