"""Nodes of `thunder up` on this machine, for measurements: in network namespaces, or on loopback.

Namespaces (Linux, root) have cables whose rate can be set. On loopback each node has a port and cores of its own, and
ranks have to be told `--transport tcp`, since they share a machine.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

# The longest command: it loads a model, or waits for an answer.
LIMIT_S = float(os.environ.get("DESK_LIMIT_S", 120))
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("THUNDER_")}


class Node:
    """An agent on some cores, with its own data and its own Hugging Face cache."""

    def __init__(self, program, name, cores, folder, address, port, loopback=False):
        self.program, self.name, self.cores = program, name, cores
        self.address, self.listen = address, f"{address}:{port}"
        self.folder, self.loopback, self.holder = os.path.join(folder, name), loopback, None
        os.makedirs(self.folder, exist_ok=True)
        self.environment = CLEAN | {"THUNDER_DATA": os.path.join(self.folder, "node"), "THUNDER_DEVICE": "cpu",
                                    "HF_HOME": os.path.join(self.folder, "huggingface")}
        if not loopback:
            self.holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
            time.sleep(0.3)
            self.sh("ip link set lo up")

    def words(self, words):
        enter = [] if self.loopback else ["nsenter", "--target", str(self.holder.pid), "--net"]
        return [*enter, *words]

    def pin(self):
        os.sched_setaffinity(0, self.cores)

    def sh(self, script):
        subprocess.run(self.words(["sh", "-c", script]), check=True)

    def thunder(self, *words, check=True):
        try:
            done = subprocess.run(self.words([self.program, *words]), env=self.environment, capture_output=True, text=True,
                                  preexec_fn=self.pin, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{words}: not done within {LIMIT_S} s") from None
        if check and done.returncode:
            raise SystemExit(f"{words}: {done.stderr}")
        return done.stdout

    def up(self, *words):
        own = ["up", "--name", self.name, "--listen", self.listen, "--port", "0", "--no-discovery", *words]
        self.agent = subprocess.Popen(self.words([self.program, *own]), env=self.environment, stderr=subprocess.DEVNULL,
                                      stdin=subprocess.DEVNULL, preexec_fn=self.pin)

    def join(self, member):
        self.up("--join", member.listen, "--token", member.thunder("cluster", "token").strip())

    def status(self):
        said = self.thunder("cluster", "status", "--json", check=False)
        return json.loads(said) if said else {"members": []}

    def end(self):
        if hasattr(self, "agent"):
            self.thunder("cluster", "stop", check=False)
            self.agent.wait(timeout=30)
        if self.holder:
            self.holder.terminate()


def wait(what, look):
    for _ in range(600):
        if look():
            return
        time.sleep(0.1)
    raise SystemExit(f"{what}: not within a minute")


def together(nodes):
    """Whether each node reaches all, and knows where they listen."""
    for node in nodes:
        members = node.status()["members"]
        if sum(member["up"] and bool(member["addresses"]) for member in members) != len(nodes):
            return False
    return True


def cluster(nodes):
    """Starts the nodes, and makes them one cluster."""
    first, *others = nodes
    first.up()
    wait("the first agent", lambda: first.status()["members"])
    for node in others:
        node.join(first)
    wait("all nodes", lambda: together(nodes))


def desk(program, cores, loopback):
    """Nodes ant, bee, cat … with these sets of cores, each connected to all, not started yet."""
    # A script that is stopped ends its agents too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    folder, program = tempfile.mkdtemp(), os.path.abspath(program)
    names = ("ant", "bee", "cat", "dog")
    # Ranks are reached where their agent has called from: on loopback that is 127.0.0.1.
    place = lambda number: ("127.0.0.1", 7470 + number) if loopback else (f"10.9.0.{number}", 7470)
    nodes = [Node(program, name, set(own), folder, *place(number), loopback)
             for number, (name, own) in enumerate(zip(names, cores), 1)]
    if loopback:
        return nodes, None
    switch = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    time.sleep(0.3)
    enter = ["nsenter", "--target", str(switch.pid), "--net"]
    subprocess.run([*enter, "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0"], check=True)
    subprocess.run([*enter, "ip", "link", "set", "br0", "up"], check=True)
    for node in nodes:
        pair = ["ip", "link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", str(node.holder.pid)]
        subprocess.run([*enter, *pair], check=True)
        subprocess.run([*enter, "ip", "link", "set", node.name, "master", "br0", "up"], check=True)
        node.sh(f"ip address add {node.address}/24 dev eth0 && ip link set eth0 up")
    return nodes, switch


def infer(node, model, prompt, tokens):
    said = node.thunder("model", "infer", model, prompt, "--max-tokens", str(tokens), "--ignore-eos", "--json")
    return json.loads(said)


def throughput(node, model, clients, prompt_tokens, tokens):
    """Tokens a second of requests that clients on a node send, each its next one when it has its answer: two each."""
    status = node.status()
    api = next(member["report"]["api"] for member in status["members"] if member["id"] == status["me"])
    # Over the node's own network.
    own = [sys.executable, os.path.abspath(__file__), api, model, *map(str, (clients, prompt_tokens, tokens))]
    try:
        said = subprocess.run(node.words(own), capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the clients have no answers after {LIMIT_S} s") from None
    print(said.stderr.strip(), file=sys.stderr)
    if said.returncode:
        raise SystemExit("the clients failed")
    return float(said.stdout)


def drive(api, model, clients, prompt_tokens, tokens):
    """The clients: no two prompts begin alike."""
    done = []

    def ask(start, words, tokens):
        prompt = f"{start} " + " ".join(f"word{word}" for word in range(words))
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(f"http://{api}/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["usage"]

    # What a word takes is the tokenizer's.
    words = round(40 * prompt_tokens / ask("count", 40, 1)["prompt_tokens"])

    def client(number):
        for turn in range(2):
            done.append(ask(f"{number} {turn}", words, tokens))

    began = time.monotonic()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(done) != 2 * clients:
        sys.exit(f"{2 * clients - len(done)} requests failed")
    tokens = {kind: sum(usage[kind] for usage in done) for kind in ("prompt_tokens", "completion_tokens")}
    print(f"{tokens} in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return tokens["completion_tokens"] / (time.monotonic() - began)


if __name__ == "__main__":
    print(drive(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
