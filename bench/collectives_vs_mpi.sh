#!/bin/bash
# All-reduce between two ranks on two cores: thunder-collectives, Open MPI and MLX's ring, side by
# side, as a Markdown table.
#
#   bench/collectives_vs_mpi.sh [f32|bf16] [MILLISECONDS_PER_ROW] [ROUNDS]
#
# Needs `apt-get install openmpi-bin libopenmpi-dev`. MLX is measured when the Python in $MLX_PYTHON
# has it (`pip install "mlx[cpu]"`). In each round the libraries take turns, and each measures every
# size; a table's figure is the median over the rounds. NICE: the command that starts everything
# (default `nice -n 0`). SIZES: other message sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-f32} milliseconds=${2:-100} rounds=${3:-5}
sizes=${SIZES:-8 1024 8192 16384 65536 1048576 16777216}
nice=${NICE:-nice -n 0}
target=${CARGO_TARGET_DIR:-target}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cargo build --quiet --locked --release --workspace --example comm
comm=$target/release/examples/comm
mpicc -O3 -march=native -o "$work/mpi" bench/allreduce_mpi.c

port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

ours() { # transport
    local flag=()
    [ "$kind" = bf16 ] && flag=(--bf16)
    export THUNDER_WORLD_SIZE=2 THUNDER_TRANSPORT=$1 THUNDER_COORDINATOR=127.0.0.1:$(port)
    THUNDER_RANK=1 $nice taskset -c 1 "$comm" --json --ms "$milliseconds" "${flag[@]}" $sizes &
    THUNDER_RANK=0 $nice taskset -c 0 "$comm" --json --ms "$milliseconds" "${flag[@]}" $sizes
    wait $!
}

mpi() { # byte transfer layer
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 $nice mpirun -n 2 --bind-to core --mca pml ob1 \
        --mca btl "self,$1" --mca btl_tcp_if_include lo "$work/mpi" "$kind" "$milliseconds" $sizes
}

mlx() {
    echo "[[\"127.0.0.1:$(port)\"], [\"127.0.0.1:$(port)\"]]" > "$work/hosts.json"
    export MLX_HOSTFILE=$work/hosts.json
    MLX_RANK=1 $nice taskset -c 1 "$MLX_PYTHON" bench/allreduce_mlx.py "$kind" "$milliseconds" $sizes &
    MLX_RANK=0 $nice taskset -c 0 "$MLX_PYTHON" bench/allreduce_mlx.py "$kind" "$milliseconds" $sizes
    wait $!
}

for ((round = 0; round < rounds; round++)); do
    ours shm >> "$work/ours-shm"
    mpi vader >> "$work/mpi-shm"
    ours tcp >> "$work/ours-tcp"
    mpi tcp >> "$work/mpi-tcp"
    if [ -n "${MLX_PYTHON:-}" ]; then mlx >> "$work/mlx"; fi
done

python3 - "$work" "$kind" "$rounds" <<'PYTHON'
import json, pathlib, statistics, sys
work, kind, rounds = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def read(name):
    path, rows = work / name, {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        rows.setdefault(row["bytes"], []).append(row["median_us"])
    return {size: statistics.median(values) for size, values in rows.items()}

ours, mpi = read("ours-shm"), read("mpi-shm")
ours_tcp, mpi_tcp, ring = read("ours-tcp"), read("mpi-tcp"), read("mlx")
show = lambda value: "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
ratio = lambda other, own: "-" if other is None else f"{other / own:.2f}"
print(f"{kind}, median of {rounds} rounds, µs; a ratio above 1: thunder is faster\n")
print("| bytes | thunder shm | MPI shm | ratio | thunder TCP | MPI TCP | ratio | MLX ring | ratio |")
print("|---|---|---|---|---|---|---|---|---|")
for size in ours:
    cells = [show(ours[size]), show(mpi[size]), ratio(mpi[size], ours[size]), show(ours_tcp[size]), show(mpi_tcp[size]),
             ratio(mpi_tcp[size], ours_tcp[size]), show(ring.get(size)), ratio(ring.get(size), ours_tcp[size])]
    print(f"| {size} | " + " | ".join(cells) + " |")
PYTHON
