#!/usr/bin/env python3
"""What keys, limits and usage records cost a request, and how exact limits are.

    bench/keys.py THUNDER [--nodes 0] [--seconds 300] [--rounds 12]

Runs the built-in model twice, without and with a store, in turns: requests a second with 32 clients, and the time of
requests one after the other. Then 200 clients with 20 keys ask for --seconds; half of the keys are limited by requests,
half by tokens. Prints what each key was admitted of what its limit allows, and whether every answer is in the usage
report. --nodes 2 does the same through the gateways of a cluster of `thunder up`. Python's standard library is enough.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

KEYS, CLIENTS, ANSWER = 20, 200, 4
PARTS = ["authorize", "wait", "switch", "prepare", "admit", "record"]
PROMPT = "The sea"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("THUNDER_")}


class Servers:
    """Processes that end with the benchmark, and where they answer."""

    def __init__(self, program, folder):
        self.program, self.folder, self.running = program, Path(folder), []

    def run(self, *words, **more):
        done = subprocess.run([self.program, *map(str, words)], stdout=subprocess.PIPE, check=True,
                              env=ENVIRONMENT | {"THUNDER_DATA": str(self.folder / "a")} | more)
        return done.stdout.decode().strip()

    def start(self, pattern, *words):
        child = subprocess.Popen([self.program, *map(str, words)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                 env=ENVIRONMENT)
        self.running.append(child)
        said = ""
        for line in child.stderr:
            said += line.decode()
            if found := re.search(pattern, said):
                # What follows is read by nobody, and must not fill the pipe.
                child.stderr_reader = subprocess.Popen(["cat"], stdin=child.stderr, stdout=subprocess.DEVNULL)
                return found
        raise SystemExit(f"thunder {words} ended: {said}")

    def serve(self, *words):
        return address(self.start(r"on http://(\S+?)/v1", "serve", "builtin", "--port", 0, "--max-batch", 16, *words)[1])

    def nodes(self, count):
        """Gateways of a cluster whose head is the first node."""
        gateways, joins = [], []
        for name in "abcdefgh"[:count]:
            found = self.start(r"models of the cluster are at http://(\S+?)/v1[\s\S]*listens on ([\d.:]+);", "up", "--name",
                               name, "--data", self.folder / name, "--listen", "127.0.0.1:0", "--port", 0, "--no-discovery",
                               *joins)
            gateways.append(address(found[1]))
            token = self.run("cluster", "token")
            joins = ["--join", found[2] if not joins else joins[1], "--token", token]
        self.run("model", "load", "builtin", "--nodes", 1, "--", "--max-batch", 16)
        for _ in range(600):
            status = json.loads(self.run("cluster", "status", "--json"))
            if status["models"] and status["models"][0]["ready"] and sum(m["up"] for m in status["members"]) == count:
                time.sleep(1)
                return gateways
            time.sleep(0.1)
        raise SystemExit(f"the cluster is not ready: {status}")

    def end(self):
        for child in self.running:
            child.terminate()
        for child in self.running:
            child.wait()


def address(text):
    host, port = text.rsplit(":", 1)
    return host, int(port)


class Client:
    """One connection, kept where the server keeps it."""

    def __init__(self, place, key):
        self.place, self.pipe = place, None
        body = json.dumps({"model": "default", "prompt": PROMPT, "max_tokens": ANSWER, "ignore_eos": True}).encode()
        self.request = (f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
                        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n").encode() + body

    async def ask(self):
        """Status, milliseconds to wait, and body."""
        if self.pipe is None:
            self.pipe = await asyncio.open_connection(*self.place)
        reader, writer = self.pipe
        writer.write(self.request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))
        if "connection: close" in head:
            writer.close()
            self.pipe = None
        wait = re.search(r"retry-after-ms: (\d+)", head)
        return int(head[9:12]), int(wait[1]) if wait else 0, body


async def throughput(place, key, seconds, clients=32):
    until, done = time.monotonic() + seconds, 0

    async def loop():
        nonlocal done
        client = Client(place, key)
        while time.monotonic() < until:
            status, _, body = await client.ask()
            assert status == 200, body
            done += 1

    began = time.monotonic()
    await asyncio.gather(*(loop() for _ in range(clients)))
    return done / (time.monotonic() - began)


async def latencies(place, key, count):
    client, times = Client(place, key), []
    for _ in range(count):
        began = time.perf_counter()
        status, _, body = await client.ask()
        assert status == 200, body
        times.append((time.perf_counter() - began) * 1e3)
    return times


async def limited(places, keys, seconds):
    """Answers and refusals of each key."""
    answered, refused = [0] * KEYS, [0] * KEYS
    until = time.monotonic() + seconds

    async def loop(nth):
        key = nth % KEYS
        client = Client(places[nth // KEYS % len(places)], keys[key])
        while time.monotonic() < until:
            status, wait, body = await client.ask()
            if status == 200:
                answered[key] += 1
            elif status == 429:
                refused[key] += 1
                await asyncio.sleep(min(wait, 250) / 1e3)
            else:
                raise SystemExit(f"status {status}: {body}")

    await asyncio.gather(*(loop(nth) for nth in range(CLIENTS)))
    return answered, refused


async def own_times(places, key):
    """Of each gateway: answered requests by what the gateway itself took, what it computed of that, and each part."""
    found = {"own_seconds": {}, "computed_seconds": {}} | {f'own_part_seconds{{part="{part}"}}': {} for part in PARTS}
    for place in places:
        reader, writer = await asyncio.open_connection(*place)
        writer.write(f"GET /metrics HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
        for name, buckets in found.items():
            name, _, part = name.rstrip("}").partition("{")
            for labels, count in re.findall(rf"thunder:gateway_{name}_bucket{{([^}}]*)}} (\d+)", text):
                if part in labels:
                    limit = float(re.search(r'le="([^"]+)"', labels)[1])
                    buckets[limit] = buckets.get(limit, 0) + int(count)
    return found


def quantile(before, after, share):
    """Milliseconds; linear within a bucket, as Prometheus has it."""
    counts = [(limit, after[limit] - before.get(limit, 0)) for limit in sorted(after)]
    wanted, low, below = counts[-1][1] * share, 0.0, 0
    for limit, count in counts:
        if count >= wanted:
            return 1e3 * (low + (limit - low) * (wanted - below) / max(count - below, 1))
        low, below = limit, count


def percentile(values, share):
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def cost(off, on, key, rounds):
    await throughput(off, "none", 2)
    await throughput(on, key, 2)
    rates, times = {"off": [], "on": []}, {"off": [], "on": []}
    for nth in range(rounds):
        pairs = [("off", off, "none"), ("on", on, key)]
        for name, place, secret in pairs if nth % 2 else reversed(pairs):
            rates[name].append(await throughput(place, secret, 4))
        for name, place, secret in pairs if nth % 2 else reversed(pairs):
            times[name] += await latencies(place, secret, 150)
    ratio = statistics.median(b / a for a, b in zip(rates["off"], rates["on"]))
    print(f"requests/s with 32 clients: {statistics.median(rates['off']):.1f} without, "
          f"{statistics.median(rates['on']):.1f} with keys; median of {rounds} pairs {100 * (ratio - 1):+.2f} %")
    for name, share in [("median", 0.5), ("p99", 0.99)]:
        a, b = percentile(times["off"], share), percentile(times["on"], share)
        print(f"one request after the other, {name}: {a:.3f} ms without, {b:.3f} ms with keys: {b - a:+.3f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("thunder")
    parser.add_argument("--nodes", type=int, default=0, help="gateways of a cluster; 0: a single `thunder serve`")
    parser.add_argument("--seconds", type=int, default=300, help="time of the limited run; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of rounds with and without keys; 0 leaves them out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(os.path.abspath(args.thunder), folder)
        try:
            asyncio.run(measure(servers, args))
        finally:
            servers.end()


async def measure(servers, args):
    where = {} if args.nodes else {"THUNDER_STORE": str(servers.folder / "store")}
    if args.nodes:
        plain = Servers(servers.program, servers.folder / "plain")
        servers.running = plain.running
        off = plain.nodes(1)[0] if args.rounds else None
        places = servers.nodes(args.nodes)
    else:
        off = servers.serve("--no-store") if args.rounds else None
        places = [servers.serve("--store", servers.folder / "store")]
    free = servers.run("keys", "create", "free", **where)
    time.sleep(1)
    if args.rounds:
        await cost(off, places[0], free, args.rounds)
    if not args.seconds:
        return
    _, _, body = await Client(places[0], free).ask()
    usage = json.loads(body)["usage"]
    tokens = usage["prompt_tokens"] + usage["completion_tokens"]
    keys, allowed = [], []
    for nth in range(KEYS):
        requests = 12 * (1 + nth // 2)
        allowed.append(requests)
        limit = ["--requests-per-minute", requests] if nth % 2 == 0 else ["--tokens-per-minute", requests * tokens]
        keys.append(servers.run("keys", "create", f"key-{nth}", *limit, **where))
    time.sleep(1)
    before = json.loads(servers.run("usage", "--format", "json", **where))["total"]
    taken = await own_times(places, free)
    answered, refused = await limited(places, keys, args.seconds)
    for name, after in (await own_times(places, free)).items():
        times = ", ".join(f"{what} {quantile(taken[name], after, share):.3f} ms" for what, share in [("median", 0.5), ("p99", 0.99)])
        print(f"thunder:gateway_{name} of an answered request: {times}")
    time.sleep(2)
    minutes = -(-args.seconds // 60)
    off_by = [got / (limit * minutes) - 1 for got, limit in zip(answered, allowed)]
    worst = max(off_by, key=abs)
    print(f"{CLIENTS} clients, {KEYS} keys, {args.seconds} s, {len(places)} gateways: {sum(answered)} answers, "
          f"{sum(refused)} refusals; of what limits allow, the worst key got {100 * worst:+.2f} %")
    total = json.loads(servers.run("usage", "--format", "json", **where))["total"]
    for name, counted in [("requests", sum(answered)), ("refused", sum(refused))]:
        print(f"{name}: {counted} counted by the clients, {total[name] - before[name]} in the usage report")


if __name__ == "__main__":
    main()
