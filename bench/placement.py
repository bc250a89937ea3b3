#!/usr/bin/env python3
"""Predicted against measured: `thunder cluster plan` on two nodes of one core each.

    sudo bench/placement.py PROGRAM MODEL... > table.md

Two network namespaces of this machine, each with `thunder up` on a core of its own, joined by a cable that
takes as many bits a second as `tc` lets through. For each model and cable: one node alone, tensor parallel
and pipeline on both, so three models' worth of layouts on each of three cables. Linux, root, two free cores.
With `--delay-ms`, netem delays each packet too, where the kernel has it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

CABLES = {"veth": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
PROMPT = " ".join(f"word{number}" for number in range(12))
TOKENS = 48
# Random weights repeat themselves, and guessing would be measured.
PLAIN = ["--no-speculation"]
ROUNDS = 3


class Node:
    """A namespace with an agent on one core."""

    def __init__(self, program, name, core, folder):
        self.program, self.name, self.core = program, name, core
        self.data = os.path.join(folder, name)
        self.holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        time.sleep(0.3)
        self.sh("ip link set lo up")

    def words(self, words):
        enter = ["nsenter", "--target", str(self.holder.pid), "--net", "taskset", "-c", str(self.core)]
        return enter + list(words)

    def sh(self, script):
        subprocess.run(self.words(["sh", "-c", script]), check=True)

    def thunder(self, *words, check=True):
        environment = dict(os.environ, THUNDER_DATA=self.data)
        done = subprocess.run(self.words([self.program, *words]), env=environment, capture_output=True, text=True)
        if check and done.returncode:
            raise SystemExit(f"{words}: {done.stderr}")
        return done.stdout

    def up(self, address, *words):
        environment = dict(os.environ, THUNDER_DATA=self.data)
        own = ["up", "--name", self.name, "--listen", f"{address}:7470", "--port", "0", "--no-discovery", *words]
        self.agent = subprocess.Popen(self.words([self.program, *own]), env=environment, stderr=subprocess.DEVNULL)


def wait(what, look):
    for _ in range(600):
        if look():
            return
        time.sleep(0.1)
    raise SystemExit(f"{what}: not within a minute")


def infer(node, model, prompt, tokens):
    said = node.thunder("model", "infer", model, prompt, "--max-tokens", str(tokens), "--ignore-eos", "--json")
    return json.loads(said)


def measure(node, model):
    """Tokens a second of decode, the best of some rounds: what others take is not the machine's speed."""
    infer(node, model, "Count.", 8)
    rates = []
    for number in range(ROUNDS):
        said = infer(node, model, f"{number} {PROMPT}", TOKENS)
        rates.append((said["tokens"] - 1) / (said["seconds"] - said["first_token_s"]))
    return max(rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--delay-ms", type=float)
    options = parser.parse_args()
    folder = tempfile.mkdtemp()
    program = os.path.abspath(options.program)
    ant, bee = Node(program, "ant", 0, folder), Node(program, "bee", 1, folder)
    errors = []
    try:
        link = ["ip", "link", "add", "eth0", "netns", str(ant.holder.pid), "type", "veth", "peer", "name", "eth0"]
        subprocess.run([*link, "netns", str(bee.holder.pid)], check=True)
        for node, address in ((ant, "10.9.0.1"), (bee, "10.9.0.2")):
            node.sh(f"ip address add {address}/24 dev eth0 && ip link set eth0 up")
        ant.up("10.9.0.1")
        wait("the first agent", lambda: ant.thunder("cluster", "status", "--json", check=False))
        token = ant.thunder("cluster", "token").strip()
        bee.up("10.9.0.2", "--token", token)
        wait("both nodes", lambda: ant.thunder("cluster", "health", check=False) == ""
             and len(json.loads(ant.thunder("cluster", "status", "--json"))["members"]) == 2)
        wait("its address", lambda: next(member for member in json.loads(ant.thunder(
            "cluster", "status", "--json"))["members"] if member["name"] == "bee")["addresses"])
        # Each measures its machine while the other waits: they share the memory.
        ant.thunder("cluster", "plan", options.models[0], "--json")
        print("| model | cable | layout | predicted tokens/s | measured | error |")
        print("|---|---|---|---|---|---|")
        for cable, rate in CABLES.items():
            for node in (ant, bee):
                node.sh("tc qdisc del dev eth0 root 2>/dev/null || true")
                if rate:
                    node.sh(f"tc qdisc add dev eth0 root handle 1: tbf rate {rate} burst 256k latency 20ms")
                elif options.delay_ms:
                    node.sh(f"tc qdisc add dev eth0 root netem delay {options.delay_ms}ms")
            ant.thunder("stats", "--network", "--json")
            for model in options.models:
                plan = json.loads(ant.thunder("cluster", "plan", model, "--json", "--replicas", "1"))
                by_name = {layout["name"]: layout for layout in plan["layouts"]}
                both = {"tensor": ["--", *PLAIN], "pipeline": ["--", "--parallel", "pipeline", *PLAIN]}
                layouts = [(f"{kind} on ant + bee", ["--split", "ant=1,bee=1", *words]) for kind, words in both.items()]
                if rate is None:
                    layouts.insert(0, ("ant alone", ["--nodes", "ant", "--", *PLAIN]))
                for name, words in layouts:
                    found = by_name.get(name) or by_name.get(name.replace("ant + bee", "bee + ant"))
                    if found is None:
                        kind = name.split()[0]
                        found = next(layout for title, layout in by_name.items()
                                     if title.startswith(kind) and len(layout["groups"][0]["nodes"]) == 2)
                    ant.thunder("model", "load", model, *words)
                    measured, predicted = measure(ant, model), found["decode_tokens_s"]
                    ant.thunder("model", "unload", model)
                    error = predicted / measured - 1
                    errors.append(abs(error))
                    short = os.path.basename(model.rstrip("/"))
                    print(f"| {short} | {cable} | {name} | {predicted:.1f} | {measured:.1f} | {error:+.0%} |", flush=True)
        within = sum(error <= 0.2 for error in errors)
        print(f"\n{within} of {len(errors)} within 20 %, median error {statistics.median(errors):.0%}.")
    finally:
        for node in (ant, bee):
            if hasattr(node, "agent"):
                node.thunder("cluster", "stop", check=False)
                node.agent.wait(timeout=30)
            node.holder.terminate()


if __name__ == "__main__":
    sys.exit(main())
