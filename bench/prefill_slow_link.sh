#!/bin/bash
# Prefill on two ranks of one thread over a slow link, with and without hiding sums behind computing
# (`--overlap`), as a Markdown table.
#
#   bench/prefill_slow_link.sh MODEL [GBIT_PER_S...]
#
# Needs root: see wire.sh. Each setting reads a prompt of 512 tokens three times, in three rounds
# (ROUNDS); the figures are medians.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?a model folder, e.g. one that 'thunder model synth' has written}
rates=("${@:2}")
[ ${#rates[@]} != 0 ] || rates=(1 2.5 10)
rounds=${ROUNDS:-3}
thunder=${CARGO_TARGET_DIR:-target}/release/thunder
[ -x "$thunder" ] || cargo build --quiet --locked --release
source bench/wire.sh
two_hosts

measure() { # RATE OVERLAP
    local arguments=(bench prefill "$model" --threads 1 --prompt 512 --repeat 3 --overlap "$2" --json)
    THUNDER_RANK=1 inside 1 taskset -c 1 "$thunder" "${arguments[@]}" >/dev/null &
    local other=$!
    THUNDER_RANK=0 inside 0 taskset -c 0 "$thunder" "${arguments[@]}" >>"$work/$1,$2"
    wait $other
}

for rate in "${rates[@]}"; do
    limit_both "$rate"
    for ((round = 0; round < rounds; round++)); do
        for overlap in never always auto; do measure "$rate" $overlap; done
    done
done

python3 - "$work" "${rates[@]}" <<'PYTHON'
import json, pathlib, statistics, sys
work, rates = pathlib.Path(sys.argv[1]), sys.argv[2:]
names = ["never", "always", "auto"]
print("tokens/s (time that waits for sums)\n\n| Gbit/s | " + " | ".join(names) + " | always / never |\n|" + "---|" * 5)
for rate in rates:
    speed, cells = {}, []
    for name in names:
        runs = [json.loads(line) for line in (work / f"{rate},{name}").read_text().splitlines()]
        speed[name] = statistics.median(run["tokens_per_s"] for run in runs)
        share = statistics.median(run["reduce_share"] for run in runs)
        cells.append(f"{speed[name]:.1f} ({100 * share:.0f} %)")
    print(f"| {rate} | " + " | ".join(cells) + f" | {speed['always'] / speed['never']:.2f} |")
PYTHON
