#!/usr/bin/env python3
"""Decode and prefill of the same GGUF file by thunder and by llama.cpp's llama-bench, in turn; prints tables.

    bench/gguf_vs_llama.py --llama-bench FILE [--thunder FILE] [--threads 8] [--rounds 3] SHAPE:TYPE ...

SHAPE and TYPE as of bench/llama_cpp.sh, e.g. qwen3-30b-a3b:q4_0 gpt-oss-20b:mxfp4 llama-8b:q4_k_m. Each file is written to
--folder with random weights and deleted after its rounds, unless it was there. A round is one process of each program for decode (--tokens after 16
tokens) and one for a prompt (--prompt); medians of the rounds are printed, and ratios of each round. Processors only; nothing
else should run on the machine.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time


def run(command) -> tuple[dict | list, float]:
    """The JSON that a command prints, and its seconds."""
    begin = time.monotonic()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-2000:]}")
    return json.loads(done.stdout), time.monotonic() - begin


def thunder(options, file, what) -> dict:
    """Tokens/s and the share of memory or arithmetic that `bench decode` or `bench prefill` measures."""
    command = [options.thunder, "bench", what, file, "--device", "cpu", "--threads", options.threads, "--json", "--repeat", options.repeat]
    length = ["--tokens", options.tokens, "--prompt", 16] if what == "decode" else ["--prompt", options.prompt]
    result, seconds = run(command + length + ["--context", max(options.prompt, options.tokens) + 64])
    row = result["rows"][0] if what == "decode" else result
    share = row["memory_share"] if what == "decode" else row["peak_share"]
    return {"tokens_per_s": row["tokens_per_s"], "share": share, "gb_per_s": row.get("bytes_per_s", 0) / 1e9, "seconds": seconds}


def llama(options, file, what) -> dict:
    length = ["-p", 0, "-n", options.tokens] if what == "decode" else ["-p", options.prompt, "-n", 0]
    command = [options.llama_bench, "-m", file, "-t", options.threads, "-r", options.repeat, "-o", "json", "-ngl", 0]
    result, seconds = run(command + length)
    return {"tokens_per_s": result[0]["avg_ts"], "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = pathlib.Path(__file__).resolve().parent
    parser.add_argument("--thunder", default=here.parent / "target/release/thunder")
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--json", type=pathlib.Path, help="a file for all rounds")
    parser.add_argument("files", nargs="+", metavar="SHAPE:TYPE")
    options = parser.parse_args()
    print(f"| file | threads | what | thunder, tokens/s | share | llama.cpp | ratio of each round | median |\n{'|---' * 8}|")
    everything = []
    for name in options.files:
        shape, kind = name.split(":")
        file = options.folder / f"{shape}-{kind}.gguf"
        was_there = file.exists()
        if not was_there:
            subprocess.run([sys.executable, here / "gguf_model.py", shape, kind, file], check=True)
        for what in ["decode", "prefill"]:
            rounds = [{"thunder": thunder(options, file, what), "llama": llama(options, file, what)} for _ in range(options.rounds)]
            everything.append({"file": name, "what": what, "bytes": file.stat().st_size, "threads": options.threads, "rounds": rounds})
            of = lambda program, key: [one[program][key] for one in rounds]
            ours, theirs = of("thunder", "tokens_per_s"), of("llama", "tokens_per_s")
            ratios = [a / b for a, b in zip(ours, theirs)]
            share = statistics.median(of("thunder", "share"))
            measure = "of memory" if what == "decode" else "of peak"
            cells = [name, options.threads, what, f"{statistics.median(ours):.1f}", f"{share:.0%} {measure}", f"{statistics.median(theirs):.1f}"]
            cells += [", ".join(f"{ratio:.2f}" for ratio in ratios), f"**{statistics.median(ratios):.2f}**"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            print(f"{name} {what}: seconds of each process {of('thunder', 'seconds')} {of('llama', 'seconds')}", file=sys.stderr)
        if not was_there:
            file.unlink()
        if options.json:
            options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
