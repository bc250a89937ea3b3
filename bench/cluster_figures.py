#!/usr/bin/env python3
"""What an idle cluster costs, how long a second machine takes to the first token, and how fast weights come.

    sudo bench/cluster_figures.py PROGRAM MODEL [--seconds 60]            # nodes in network namespaces
    bench/cluster_figures.py --loopback --cores 0-4,5-9,10-15 PROGRAM MODEL

Prints, as JSON: processor time, memory and written bytes of idle agents; seconds from `thunder up --token` on the
second node to its membership, to the loaded model and to the first token, once where the plan puts the model and once
on both nodes; and what the link carries by TLS against a pull over it. MODEL is a folder that all nodes see, of
`thunder model synth`, say. Linux.
"""

import argparse
import hashlib
import json
import os
import sys
import time

from desk import cluster, desk, infer, together, wait
from placement import ranges

PULLED_BYTES = 600 << 20


def cost(pid):
    """Seconds of processor time, bytes of memory, bytes written to disks."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    written = dict(line.split(":") for line in open(f"/proc/{pid}/io"))["write_bytes"]
    return ticks / os.sysconf("SC_CLK_TCK"), int(status["VmRSS"].split()[0]) * 1024, int(written)


def put_model(node):
    """A model in the node's Hugging Face cache, as a pull leaves it."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = os.path.join(node.environment["HF_HOME"], "hub", "models--org--big")
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        os.makedirs(os.path.join(cache, part))
    with open(os.path.join(cache, "refs", "main"), "w") as file:
        file.write(commit)
    for name, content in (("config.json", b"{}"), ("model.safetensors", os.urandom(1 << 20) * (PULLED_BYTES >> 20))):
        digest = hashlib.sha256(content).hexdigest()
        with open(os.path.join(cache, "blobs", digest), "wb") as file:
            file.write(content)
        os.symlink(f"../../blobs/{digest}", os.path.join(cache, "snapshots", commit, name))


def pull(ant, bee):
    """Bytes a second of the link by TLS, and of a pull over it."""
    put_model(ant)
    ant.thunder("stats", "--network", "--json")
    status = ant.status()
    own = next(member["short"] for member in status["members"] if member["id"] == status["me"])
    link = next(link["bytes_s"] for link in status["links"] if link["from"] == own)
    best = 0.0
    for _ in range(3):
        pulled = json.loads(ant.thunder("model", "pull", "org/big", "--nodes", bee.name, "--json"))
        best = max(best, pulled["nodes"][0]["done"] / pulled["seconds"])
        ant.thunder("model", "remove", "org/big", "--nodes", bee.name, "--json")
    return {"link_mb_s": link / 1e6, "pull_mb_s": best / 1e6, "share": best / link}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--cores", type=ranges, help="cores of each of three nodes [default: all for each]")
    options = parser.parse_args()
    every = sorted(os.sched_getaffinity(0))
    (ant, bee, cat), switch = desk(options.program, options.cores or [every] * 3, options.loopback)
    nodes, figures = [ant, bee, cat], {}
    extra = ["--", "--transport", "tcp"] if options.loopback else []
    try:
        ant.up()
        wait("the first agent", lambda: ant.status()["members"])
        for kind, words in (("planned", []), ("on both", ["--nodes", "all", *extra])):
            began = time.monotonic()
            bee.join(ant)
            wait("two nodes", lambda: together([ant, bee]))
            joined = time.monotonic() - began
            bee.thunder("model", "load", options.model, *words)
            loaded = time.monotonic() - began
            first = infer(bee, options.model, "Hello", 4)["first_token_s"]
            figures[f"first token, {kind}"] = {"joined_s": joined, "loaded_s": loaded, "first_token_s": loaded + first}
            bee.thunder("model", "unload", options.model)
            bee.thunder("cluster", "leave")
            bee.agent.wait(timeout=30)
        for node in (bee, cat):
            node.join(ant)
        wait("three nodes", lambda: together(nodes))
        figures["pull"] = pull(ant, bee)
        # New links settle, and are measured once.
        time.sleep(15)
        before = [cost(node.agent.pid) for node in nodes]
        time.sleep(options.seconds)
        after = [cost(node.agent.pid) for node in nodes]
        figures["idle agents"] = [
            {"core": (late[0] - early[0]) / options.seconds, "rss_mb": late[1] / 1e6, "written": late[2] - early[2]}
            for early, late in zip(before, after)
        ]
        print(json.dumps(figures, indent=1))
    finally:
        for node in nodes:
            node.end()
        if switch:
            switch.terminate()


if __name__ == "__main__":
    sys.exit(main())
