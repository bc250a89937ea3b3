#!/usr/bin/env python3
"""Memory under hostile clients, and ranks under other launchers: the figures of docs/lab/trial.md.

    bench/trial.py THUNDER bodies [--count 12] [--messages 250000]
    bench/trial.py THUNDER readers [--count 300] [--serve --max-batch 1]
    bench/trial.py THUNDER launchers --mlx-launch FILE [--rounds 5]

`bodies` sends --count chat requests of --messages empty messages at once to `thunder serve builtin`; `readers` opens --count
streams and reads none of them. Both print the memory of the server before, at its peak and a minute later, and the slowest answer of
/health meanwhile. `launchers` runs `thunder bench decode builtin` in turn under MLX's launcher and under `thunder launch`, two
ranks each, and prints tokens a second of each round, medians and their ratio. Python's standard library is enough.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("THUNDER_")}


class Server:
    """`thunder serve builtin`, which ends with the benchmark."""

    def __init__(self, program, options):
        self.child = subprocess.Popen([program, "serve", "builtin", "--port", "0", *options], stdin=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, env=ENVIRONMENT)
        said = ""
        for line in self.child.stderr:
            said += line.decode()
            if found := re.search(r"on http://([\d.]+):(\d+)", said):
                self.address = (found[1], int(found[2]))
                # What follows is read by nobody, and must not fill the pipe.
                threading.Thread(target=lambda: self.child.stderr.read(), daemon=True).start()
                break
        else:
            raise SystemExit(f"the server ended: {said}")
        self.slowest, self.watching = 0.0, True
        threading.Thread(target=self.watch, daemon=True).start()

    def mib(self, field):
        with open(f"/proc/{self.child.pid}/status") as status:
            return int(re.search(rf"{field}:\s+(\d+)", status.read())[1]) // 1024

    def ask(self, path, body=b"", method="POST", limit=120):
        """The status of an answer; 0 if the connection was closed without one."""
        head = (f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
        try:
            with socket.create_connection(self.address, timeout=limit) as client:
                client.sendall(head.encode() + body)
                answer = client.recv(1 << 16)
            return int(answer.split()[1]) if answer else 0
        except OSError:
            return 0

    def watch(self):
        while self.watching:
            began = time.monotonic()
            if self.ask("/health", method="GET") == 200:
                self.slowest = max(self.slowest, time.monotonic() - began)
            time.sleep(0.1)

    def report(self, before):
        time.sleep(60)
        print(f"{before} MiB before, {self.mib('VmHWM')} at most, {self.mib('VmRSS')} a minute later; "
              f"slowest /health {self.slowest:.2f} s")
        self.watching = False
        self.child.terminate()
        self.child.wait()


def bodies(server, count, messages):
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": ""}] * messages}).encode()
    before, began, statuses = server.mib("VmRSS"), time.monotonic(), []
    threads = [threading.Thread(target=lambda: statuses.append(server.ask("/v1/chat/completions", body)))
               for _ in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(f"{count} bodies of {len(body) / 1e6:.1f} MB answered in {time.monotonic() - began:.1f} s: "
          f"{dict(Counter(statuses))} (0: closed without an answer)")
    server.report(before)


def readers(server, count):
    body = json.dumps({"model": "default", "prompt": "The sea", "max_tokens": 2000, "stream": True, "ignore_eos": True,
                       "logprobs": 5}).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode()
    before, clients = server.mib("VmRSS"), []
    for _ in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall(head + body)
        clients.append(client)
    time.sleep(90)
    print(f"{count} streams that nobody reads, for 90 s: {server.mib('VmHWM')} MiB at most")
    [client.close() for client in clients]
    server.report(before)


def launchers(program, mlx_launch, rounds):
    """Tokens a second of two ranks, in turn."""
    bench = ["bench", "decode", "builtin", "--repeat", "1", "--json"]
    ways = {
        "mlx.launch": [mlx_launch, "--backend", "ring", "-n", "2", "--", os.path.realpath(program), *bench],
        "thunder launch": [program, "launch", "-n", "2", "--", os.path.realpath(program), *bench],
    }
    speeds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, command in ways.items():
            # MLX's launcher spins if its standard input is closed: it gets one that stays open.
            silence, end = os.pipe()
            done = subprocess.run(command, stdin=silence, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT,
                                  timeout=300, check=False)
            os.close(silence), os.close(end)
            found = re.search(r'"tokens_per_s":\s*([\d.]+)', done.stdout.decode())
            if not found:
                raise SystemExit(f"{name}: {done.stdout.decode()}")
            speeds[name].append(float(found[1]))
    for name, values in speeds.items():
        print(f"{name}: {', '.join(f'{value:.0f}' for value in values)} tokens/s, median {statistics.median(values):.0f}")
    ratios = [mlx / ours for mlx, ours in zip(*speeds.values())]
    print(f"ratio of the rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}, median {statistics.median(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("thunder")
    parser.add_argument("what", choices=["bodies", "readers", "launchers"])
    parser.add_argument("--count", type=int)
    parser.add_argument("--messages", type=int, default=250_000)
    parser.add_argument("--mlx-launch", default=".venv/bin/mlx.launch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `thunder serve`, last")
    given = parser.parse_args()
    if given.what == "bodies":
        bodies(Server(given.thunder, given.serve), given.count or 12, given.messages)
    elif given.what == "readers":
        readers(Server(given.thunder, given.serve), given.count or 300)
    else:
        launchers(given.thunder, given.mlx_launch, given.rounds)


if __name__ == "__main__":
    main()
