#!/bin/bash
# What the GPU backend does on a machine with GPUs, with programs that were built elsewhere:
#   bench/gpu_run.sh FOLDER [PART ...]
# FOLDER holds thunder.xz and, for `tests` and `pair`, gpu-tests.xz: `cargo build --release -p
# thunder`, and the test program of `cargo nextest run --release -p thunder-gpu --lib --no-run`,
# both stripped and packed by xz. Parts: tests, shapes, decode, experts, small, prefill, stress
# (peers killed and stopped during sums), pair (two GPUs). Models are written to /tmp. Results go to
# $OUT.
set -u
from=$1; shift
parts=${*:-tests decode experts prefill pair}
out=${OUT:-/tmp/gpu-out}
mkdir -p "$out" /tmp/gpu-bin
export HOME=${HOME:-/root} XDG_CACHE_HOME=/tmp/gpu-cache
unpack() {
    [ -e "$from/$1.xz" ] || return 1
    xz -dc "$from/$1.xz" > "/tmp/gpu-bin/$1" 2>/dev/null \
        || python3 -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())' "$from/$1.xz" > "/tmp/gpu-bin/$1"
    chmod +x "/tmp/gpu-bin/$1"
}
unpack thunder; unpack gpu-tests
thunder=/tmp/gpu-bin/thunder tests=/tmp/gpu-bin/gpu-tests
began=$SECONDS
# step NAME SECONDS COMMAND...: runs it within the time, says how it ended.
step() {
    local name=$1 limit=$2; shift 2
    local start=$SECONDS
    timeout -k 5 "$limit" "$@" > "$out/$name.txt" 2>&1
    local code=$?
    echo "== $name: rc $code, $((SECONDS - start)) s, at $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-14}" "$out/$name.txt" | cut -c1-180
}
synth() { # NAME ARCH BITS [OPTIONS]: in the background
    local name=$1 arch=$2 bits=$3; shift 3
    [ -e "/tmp/$name" ] || timeout 240 "$thunder" model synth --arch "$arch" --bits "$bits" "$@" "/tmp/$name" > "$out/synth-$name.txt" 2>&1
}
nvidia-smi -L 2>/dev/null
case " $parts " in *" decode "*|*" prefill "*) synth 8b llama-8b 4 & of8b=$!;; esac
case " $parts " in *" experts "*) synth a3b qwen3-30b-a3b 4 --layers 12 & ofa3b=$!;; esac
case " $parts " in *" small "*) synth 1b llama-1b 4 & of1b=$!;; esac
case " $parts " in *" pair "*) synth 70b llama-70b 4 --layers 20 & of70b=$!;; esac
step devices 40 "$thunder" devices list
decode() { # NAME MODEL OPTIONS...
    local name=$1 model=$2; shift 2
    step "$name" 60 "$thunder" bench decode --device gpu --prompt 480 --tokens 64 "$@" "/tmp/$model"
}
for part in $parts; do
    case $part in
    tests)
        export THUNDER_TEST_GPU=0
        LINES_SHOWN=8 step tests-follow 60 "$tests" --test-threads 1 following recording leaving
        LINES_SHOWN=8 step tests-proof 100 "$tests" --test-threads 2 refusals families mailbox sums
        ;;
    shapes)
        export THUNDER_TEST_GPU=0
        LINES_SHOWN=70 step shapes 100 "$tests" --ignored --nocapture --test-threads 1 leaving_shapes
        ;;
    decode)
        wait "$of8b"
        decode 8b 8b --batch 1,4
        THUNDER_GPU_WITHOUT=ahead decode 8b-without-ahead 8b --batch 1
        THUNDER_GPU_WITHOUT=levels decode 8b-without-levels 8b --batch 1
        THUNDER_GPU_WITHOUT=ahead,levels decode 8b-without 8b --batch 1
        LINES_SHOWN=40 decode 8b-kernels 8b --batch 1 --kernels
        ;;
    small)
        wait "$of1b"
        decode 1b 1b --batch 1
        THUNDER_GPU_WITHOUT=ahead,levels decode 1b-without 1b --batch 1
        ;;
    experts)
        wait "$ofa3b"
        decode a3b a3b --batch 1,4
        THUNDER_GPU_WITHOUT=ahead,levels decode a3b-without a3b --batch 1
        LINES_SHOWN=40 decode a3b-kernels a3b --batch 1 --kernels
        ;;
    prefill)
        wait "$of8b"
        for without in "" prompts unchecked prompts,unchecked; do
            THUNDER_GPU_WITHOUT=$without step "8b-prefill-${without:-all}" 40 "$thunder" bench prefill --device gpu --prompt 2048 /tmp/8b
        done
        LINES_SHOWN=40 step 8b-prefill-32k 90 "$thunder" bench prefill --device gpu --prompt 32000 --repeat 1 --kernels /tmp/8b
        export THUNDER_TEST_GPU=0
        LINES_SHOWN=20 step prompts 60 "$tests" --ignored --nocapture --test-threads 1 stages_of_attention speed_of_prompts
        ;;
    stress)
        export THUNDER_TEST_GPU=0
        THUNDER_LONG=1 THUNDER_STRESS_GROUP=300000 LINES_SHOWN=4 step stress 400 "$tests" --nocapture --test-threads 1 exchanges_are_never_wrong
        ;;
    pair)
        export THUNDER_TEST_GPU=0
        LINES_SHOWN=20 step latency 100 "$tests" --ignored --nocapture --test-threads 1 latency
        if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ]; then
            wait "$of70b"
            decode 70b-one 70b --batch 1
            decode 70b-pair 70b --batch 1 --ranks 2
            THUNDER_MAILBOXES=host decode 70b-pair-host 70b --batch 1 --ranks 2
            THUNDER_MAILBOXES=never decode 70b-pair-without 70b --batch 1 --ranks 2
            step comm 40 "$thunder" bench comm --device gpu --ranks 2
            THUNDER_MAILBOXES=host step comm-host 40 "$thunder" bench comm --device gpu --ranks 2
            THUNDER_LONG=1 step sums 70 "$tests" --nocapture --test-threads 1 relayed_sums_are_never_wrong
        fi
        ;;
    esac
done
wait
