#!/bin/bash
# All-reduce between two ranks over a slow link: several TCP connections and the 8-bit wire format,
# as a Markdown table.
#
#   bench/collectives_slow_link.sh [MILLISECONDS_PER_ROW] [GBIT_PER_S...]
#
# Needs root: see wire.sh. Each setting in turn measures every size; the times are medians.
set -euo pipefail
cd "$(dirname "$0")/.."
milliseconds=${1:-500}
rates=("${@:2}")
[ ${#rates[@]} != 0 ] || rates=(1 10)
sizes="65536 1048576 16777216"
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --locked --release --workspace --example comm
comm=$target/release/examples/comm
source bench/wire.sh
two_hosts

measure() { # RATE NAME SETTING...
    THUNDER_RANK=1 inside 1 taskset -c 1 env "${@:3}" "$comm" --json --ms "$milliseconds" $sizes >/dev/null &
    local other=$!
    THUNDER_RANK=0 inside 0 taskset -c 0 env "${@:3}" "$comm" --json --ms "$milliseconds" $sizes > "$work/$1,$2"
    wait $other
}

for rate in "${rates[@]}"; do
    limit_both "$rate"
    measure "$rate" "1 connection" THUNDER_CONNECTIONS=1
    measure "$rate" "2 connections" THUNDER_CONNECTIONS=2
    measure "$rate" "4 connections" THUNDER_CONNECTIONS=4
    measure "$rate" "int8" THUNDER_CONNECTIONS=1 THUNDER_WIRE=int8
done

python3 - "$work" "${rates[@]}" <<'PYTHON'
import json, pathlib, sys
work, rates = pathlib.Path(sys.argv[1]), sys.argv[2:]
names = ["1 connection", "2 connections", "4 connections", "int8"]
print("f32, median, µs\n\n| Gbit/s | bytes | " + " | ".join(names) + " |\n|" + "---|" * (2 + len(names)))
for rate in rates:
    rows = [[json.loads(line) for line in (work / f"{rate},{name}").read_text().splitlines()] for name in names]
    for columns in zip(*rows):
        cells = [f"{row['median_us']:.0f}" for row in columns]
        print(f"| {rate} | {columns[0]['bytes']} | " + " | ".join(cells) + " |")
PYTHON
