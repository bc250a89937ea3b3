#!/usr/bin/env python3
"""What an idle cluster costs, how long a second machine takes to the first token, and how fast weights come.

    sudo bench/cluster_figures.py PROGRAM MODEL [--seconds 60]            # nodes in network namespaces
    bench/cluster_figures.py --loopback --cores 0-4,5-9,10-15 PROGRAM MODEL

Prints, as JSON: processor time, memory and written bytes of idle agents; seconds from `thunder up --token` on the
second node to its membership, to the loaded model and to the first token, once where the plan puts the model and once
on both nodes; and what the link carries by TLS, and the disk, against pulls over it. Nodes' files are in $TMPDIR;
/dev/shm leaves the disk out. MODEL is a folder that all nodes see, of
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

MIB = 1 << 20


def cost(pid):
    """Seconds of processor time, bytes of memory, bytes written to disks."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    written = dict(line.split(":") for line in open(f"/proc/{pid}/io"))["write_bytes"]
    return ticks / os.sysconf("SC_CLK_TCK"), int(status["VmRSS"].split()[0]) * 1024, int(written)


def putter(node, repo):
    """Puts files into a model of the node's Hugging Face cache, as a pull leaves it."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = os.path.join(node.environment["HF_HOME"], "hub", f"models--org--{repo}")
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        os.makedirs(os.path.join(cache, part))
    with open(os.path.join(cache, "refs", "main"), "w") as file:
        file.write(commit)

    def put(name, pieces):
        digest, path = hashlib.sha256(), os.path.join(cache, "blobs", "new")
        with open(path, "wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        os.rename(path, os.path.join(cache, "blobs", digest.hexdigest()))
        os.symlink(f"../../blobs/{digest.hexdigest()}", os.path.join(cache, "snapshots", commit, name))

    return put


def put_model(node, repo, files, file_bytes):
    """A model of noise."""
    put = putter(node, repo)
    put("config.json", [b"{}"])
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    put("model.safetensors.index.json", [json.dumps({"weight_map": dict(enumerate(names))}).encode()])
    for name in names:
        noise = os.urandom(MIB)
        put(name, (noise for _ in range(file_bytes // MIB)))


def disk_bytes_s(folder, size):
    """How fast one file of that many bytes gets to the disk."""
    path, piece = os.path.join(folder, "written"), os.urandom(4 * MIB)
    began = time.monotonic()
    with open(path, "wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    os.unlink(path)
    return size / seconds


def pulls(ant, bee, size):
    """Bytes a second of the link by TLS, of the disk, and of pulls over the link: one file, and four at once."""
    figures = {"disk_mb_s": disk_bytes_s(bee.folder, size) / 1e6}
    for repo, files in (("one", 1), ("four", 4)):
        put_model(ant, repo, files, size // files)
        ant.thunder("stats", "--network", "--json")
        status = ant.status()
        own = next(member["short"] for member in status["members"] if member["id"] == status["me"])
        link = next(link for link in status["links"] if link["from"] == own)
        one, several = link["bytes_s"], link["several_bytes_s"]
        best = told = 0.0
        for _ in range(3):
            pulled = json.loads(ant.thunder("model", "pull", f"org/{repo}", "--nodes", bee.name, "--json"))
            node = pulled["nodes"][0]
            best, told = max(best, node["done"] / node["took_ms"] * 1e3), max(told, node["done"] / pulled["seconds"])
            ant.thunder("model", "remove", f"org/{repo}", "--nodes", bee.name, "--json")
        ant.thunder("model", "remove", f"org/{repo}", "--nodes", ant.name, "--json")
        figures[f"{files} files"] = {
            "tls_1_connection_mb_s": one / 1e6, "tls_4_connections_mb_s": several / 1e6, "pull_mb_s": best / 1e6,
            "by_the_command_mb_s": told / 1e6, "share_of_1": best / one, "share_of_4": best / several}
    return figures


def parts(ant, bee, model, extra):
    """From `thunder model load` on to an announced model whose files one node has: what came over the cable, what is on
    the second node's disk, and how long it took, where the second node gets all files before and where it gets its part."""
    put, figures = putter(ant, "parts"), {}
    for name in os.listdir(model):
        with open(os.path.join(model, name), "rb") as file:
            put(name, iter(lambda: file.read(MIB), b""))
    split = ["--split", f"{ant.name}=1,{bee.name}=1"]
    for kind, stages in (("tensor", []), ("pipeline", ["--stages", "2"])):
        for whole in (True, False):
            began, before = time.monotonic(), ant.status()["sent_bytes"]
            if whole:
                ant.thunder("model", "pull", "org/parts", "--nodes", bee.name)
            ant.thunder("model", "load", "org/parts", *split, "--", "--context", "1024", *stages, *extra)
            loaded = time.monotonic() - began
            sent = ant.status()["sent_bytes"] - before
            ant.thunder("model", "unload", "org/parts")
            removed = json.loads(ant.thunder("model", "remove", "org/parts", "--nodes", bee.name, "--json"))
            figures[f"{kind}, {'all files' if whole else 'its part'}"] = {
                "loaded_s": loaded, "sent_mb": sent / 1e6, "disk_mb": removed["removed"][bee.name] / 1e6}
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--cores", type=ranges, help="cores of each of three nodes [default: all for each]")
    parser.add_argument("--pull-mib", type=int, default=2048, help="size of the model that is pulled")
    parser.add_argument("--only-pull", action="store_true")
    parser.add_argument("--only-parts", action="store_true", help="load MODEL where one of two nodes has its files")
    parser.add_argument("--rate", help="what each cable takes (tc's form: 10gbit); in namespaces")
    options = parser.parse_args()
    every = sorted(os.sched_getaffinity(0))
    (ant, bee, cat), switch = desk(options.program, options.cores or [every] * 3, options.loopback)
    nodes, figures = [ant, bee, cat], {}
    extra = ["--", "--transport", "tcp"] if options.loopback else []
    try:
        if options.rate and not options.loopback:
            # A burst must hold packets of 64 KiB, which one core sends at this speed.
            for node in nodes:
                node.sh(f"tc qdisc add dev eth0 root tbf rate {options.rate} burst 4m latency 20ms")
        ant.up()
        wait("the first agent", lambda: ant.status()["members"])
        for kind, words in () if options.only_pull or options.only_parts else (("planned", []), ("on both", ["--nodes", "all", *extra])):
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
        if options.only_parts:
            print(json.dumps(parts(ant, bee, options.model, extra[1:]), indent=1))
            return
        figures["pull"] = pulls(ant, bee, options.pull_mib * MIB)
        if options.only_pull:
            print(json.dumps(figures, indent=1))
            return
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
