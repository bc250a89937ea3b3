#!/usr/bin/env python3
"""What an idle cluster costs, and how long a second machine takes to the first token.

    sudo bench/cluster_figures.py PROGRAM MODEL [--seconds 60]

Three nodes in network namespaces of this machine. Prints, as JSON: processor time, memory and written bytes of an
idle agent; seconds from `thunder up --token` on the second node to its membership, to the loaded model and to the
first token, once where the plan puts the model and once on both nodes. Linux and root.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from placement import Node, infer, wait


def members(node):
    said = node.thunder("cluster", "status", "--json", check=False)
    return json.loads(said)["members"] if said else []


def together(nodes):
    return all(sum(member["up"] for member in members(node)) == len(nodes) for node in nodes)


def cost(pid):
    """Seconds of processor time, bytes of memory, bytes written to disks."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    written = dict(line.split(":") for line in open(f"/proc/{pid}/io"))["write_bytes"]
    return ticks / os.sysconf("SC_CLK_TCK"), int(status["VmRSS"].split()[0]) * 1024, int(written)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    folder, program, figures = tempfile.mkdtemp(), os.path.abspath(options.program), {}
    switch = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    time.sleep(0.3)
    enter = ["nsenter", "--target", str(switch.pid), "--net"]
    subprocess.run([*enter, "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0"], check=True)
    subprocess.run([*enter, "ip", "link", "set", "br0", "up"], check=True)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    nodes = []
    for number, name in enumerate(("ant", "bee", "cat"), 1):
        node = Node(program, name, cores, folder)
        pair = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(node.holder.pid)]
        subprocess.run([*enter, *pair], check=True)
        subprocess.run([*enter, "ip", "link", "set", name, "master", "br0", "up"], check=True)
        node.sh(f"ip address add 10.9.0.{number}/24 dev eth0 && ip link set eth0 up")
        node.address = f"10.9.0.{number}"
        nodes.append(node)
    ant, bee, cat = nodes
    try:
        ant.up(ant.address)
        wait("the first agent", lambda: members(ant))
        for kind, words in (("planned", []), ("on both", ["--nodes", "all"])):
            token = ant.thunder("cluster", "token").strip()
            began = time.monotonic()
            bee.up(bee.address, "--token", token)
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
            node.up(node.address, "--token", ant.thunder("cluster", "token").strip())
        wait("three nodes", lambda: together(nodes))
        # New links settle, and are measured once.
        time.sleep(20)
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
            if hasattr(node, "agent"):
                node.thunder("cluster", "stop", check=False)
                node.agent.wait(timeout=30)
            node.holder.terminate()
        switch.terminate()


if __name__ == "__main__":
    sys.exit(main())
