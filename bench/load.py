#!/usr/bin/env python3
"""How long loads take next to reading the files: load.py [--thunder PATH]... [--rounds 5] [--threads 2] MODEL...

In each round, for each MODEL (a folder or a GGUF file), in turn:
  twice   one thread reads the files twice from the page cache into 1 MiB
  load    the seconds that each `thunder run` says of its load

Each is done twice in a row, and the second counts. A virtual machine's host may have to find memory for the first,
which can take seconds (--cold: once, and that counts).
"""

import argparse
import os
import re
import statistics
import subprocess
import time
from pathlib import Path

BUFFER_BYTES = 1 << 20


def files_of(model: Path) -> list:
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def size_of(model: Path) -> int:
    return sum(file.stat().st_size for file in files_of(model))


def twice(model: Path) -> float:
    buffer, began = bytearray(BUFFER_BYTES), time.perf_counter()
    for file in 2 * files_of(model):
        with open(file, "rb", buffering=0) as reader:
            while reader.readinto(buffer):
                pass
    return time.perf_counter() - began


def load(thunder: str, model: Path, threads: int) -> tuple:
    """Seconds of the load; user and system seconds and the most memory of the process, in GB."""
    command = [thunder, "run", str(model), "hi", "--raw", "--max-tokens", "1", "--context", "512"]
    environment = {**os.environ, "RUST_LOG": "info", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [*command, "--threads", str(threads)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    found = re.search(r"seconds=([0-9.]+)", re.sub(r"\x1b\[[0-9;]*m", "", output))
    if status or not found:
        raise SystemExit(f"{' '.join(command)}:\n{output}")
    return float(found[1]), usage.ru_utime, usage.ru_stime, usage.ru_maxrss / 1e6 * 1.024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--thunder", action="append", help="a program to measure; several are measured in turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="do each once")
    arguments = parser.parse_args()
    programs = arguments.thunder or ["target/release/thunder"]
    for model in arguments.models:
        size = size_of(model)
        rows = {"twice": []} | {program: [] for program in programs}
        twice(model)
        for _ in range(arguments.rounds):
            measures = {"twice": lambda: twice(model)}
            for program in programs:
                measures[program] = lambda program=program: load(program, model, arguments.threads)
            for name, measure in measures.items():
                if not arguments.cold:
                    measure()
                rows[name].append(measure())
        read = statistics.median(rows["twice"])
        seconds = lambda values: " ".join(f"{value:.3f}" for value in values)
        print(f"{model}, {size / 1e9:.2f} GB", flush=True)
        print(f"  twice {seconds(rows['twice'])}")
        for program in programs:
            loads, user, system, most = (list(column) for column in zip(*rows[program]))
            median = statistics.median(loads)
            print(f"  load  {seconds(loads)}: median {median:.3f}, {median / read:.2f} times twice; {program}")
            print(f"        user {statistics.median(user):.2f} s, system {statistics.median(system):.2f} s, "
                  f"most memory {max(most):.2f} GB", flush=True)


if __name__ == "__main__":
    main()
