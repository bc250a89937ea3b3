#!/bin/bash
# All-reduce between two ranks over a slow link: several TCP connections and the 8-bit wire format, as a Markdown table.
#
#   bench/collectives_slow_link.sh [MILLISECONDS_PER_ROW] [GBIT_PER_S...]
#
# Takes root: the ranks are in network namespaces with a veth pair between them, whose ends `tc` limits to the rate. One
# after the other, each setting measures every size; the times are medians.
set -euo pipefail
cd "$(dirname "$0")/.."
milliseconds=${1:-500}
rates=("${@:2}")
[ ${#rates[@]} != 0 ] || rates=(1 10)
sizes="65536 1048576 16777216"
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --locked --release --workspace --example comm
comm=$target/release/examples/comm
work=$(mktemp -d) holders=()
trap 'kill "${holders[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT

# A namespace lives as long as a process in it.
for rank in 0 1; do
    unshare --net sleep 3600 &
    holders+=($!)
done
sleep 0.5
inside() { nsenter --net="/proc/${holders[$1]}/ns/net" "${@:2}"; }
inside 0 ip link add wire0 type veth peer name wire1 netns "${holders[1]}"
for rank in 0 1; do
    inside $rank ip link set lo up
    inside $rank ip addr add "10.77.0.$((rank + 1))/24" dev "wire$rank"
    # Short packets, for a short burst: with a long one, the median of a short message would not see the rate.
    inside $rank ip link set "wire$rank" up gso_max_size 16384
done

measure() { # RATE NAME SETTING...
    export THUNDER_WORLD_SIZE=2 THUNDER_TRANSPORT=tcp THUNDER_COORDINATOR=10.77.0.1:7777 THUNDER_SECRET=wire
    THUNDER_RANK=1 inside 1 taskset -c 1 env "${@:3}" "$comm" --json --ms "$milliseconds" $sizes >/dev/null &
    local other=$!
    THUNDER_RANK=0 inside 0 taskset -c 0 env "${@:3}" "$comm" --json --ms "$milliseconds" $sizes > "$work/$1,$2"
    wait $other
}

for rate in "${rates[@]}"; do
    for rank in 0 1; do
        # A burst of a few of the packets that the kernel makes; more would hide the rate from short messages.
        inside $rank tc qdisc replace dev "wire$rank" root tbf rate "${rate}gbit" burst 64kb latency 50ms
    done
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
