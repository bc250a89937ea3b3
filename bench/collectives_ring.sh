#!/bin/bash
# All-reduce among 4 ranks where only neighbours have a wire: every algorithm, as a Markdown table.
#
#   bench/collectives_ring.sh [MILLISECONDS_PER_ROW] [MBIT_PER_S...]
#
# Needs root: see wire.sh; each rank has a wire to the next one around, and the ranks between
# forward messages of ranks that are not neighbours. Times are medians.
set -euo pipefail
cd "$(dirname "$0")/.."
milliseconds=${1:-500}
rates=("${@:2}")
[ ${#rates[@]} != 0 ] || rates=(200)
sizes="65536 1048576 16777216"
ranks=4
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --locked --release --workspace --example comm
comm=$target/release/examples/comm
source bench/wire.sh
hosts $ranks
# Wire R joins rank R (address 10.78.R.1, device right) and the next one (10.78.R.2, device left).
for ((rank = 0; rank < ranks; rank++)); do
    wire $rank right "10.78.$rank.1/24" $(((rank + 1) % ranks)) left "10.78.$rank.2/24"
    inside $rank sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
done
for ((rank = 0; rank < ranks; rank++)); do
    before=$(((rank + ranks - 1) % ranks)) next=$(((rank + 1) % ranks)) across=$(((rank + 2) % ranks))
    inside $rank ip route add "10.78.$next.0/24" via "10.78.$rank.2"
    inside $rank ip route add "10.78.$across.0/24" via "10.78.$before.1"
done

for rate in "${rates[@]}"; do
    for ((rank = 0; rank < ranks; rank++)); do
        for device in right left; do limit $rank $device "${rate}mbit"; done
    done
    export THUNDER_WORLD_SIZE=$ranks THUNDER_TRANSPORT=tcp THUNDER_COORDINATOR=10.78.0.1:7777 THUNDER_SECRET=wire
    others=()
    for ((rank = 1; rank < ranks; rank++)); do
        THUNDER_RANK=$rank inside $rank "$comm" --all --json --ms "$milliseconds" $sizes >/dev/null &
        others+=($!)
    done
    THUNDER_RANK=0 inside 0 "$comm" --all --json --ms "$milliseconds" $sizes > "$work/$rate"
    wait "${others[@]}"
done

python3 - "$work" "${rates[@]}" <<'PYTHON'
import json, pathlib, sys
work, rates = pathlib.Path(sys.argv[1]), sys.argv[2:]
tables = {rate: [json.loads(line) for line in (work / rate).read_text().splitlines()] for rate in rates}
names = list(dict.fromkeys(row["algorithm"] for rows in tables.values() for row in rows))
print("f32, median, µs\n\n| Mbit/s | bytes | " + " | ".join(names) + " |\n|" + "---|" * (2 + len(names)))
for rate, rows in tables.items():
    for size in dict.fromkeys(row["bytes"] for row in rows):
        times = {row["algorithm"]: row["median_us"] for row in rows if row["bytes"] == size}
        print(f"| {rate} | {size} | " + " | ".join(f"{times[name]:.0f}" for name in names) + " |")
PYTHON
