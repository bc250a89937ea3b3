#!/bin/bash
# Decode of one request and a prompt of 2,048 tokens, next to llama.cpp's CUDA, on a machine with a
# GPU and nvcc:
#   bench/gpu_llama.sh FOLDER SHAPE:BITS[:LAYERS] ...
# FOLDER holds thunder.xz (stripped), llama.tar.xz (the tree vendor/llama.cpp of llama-cpp-python)
# and gguf_model.py. BITS: 4 (Q4_0) or 8 (Q8_0); LAYERS cuts both models. llama.cpp is built with
# flash attention for compute capability 9.0. Models with random weights are written to /tmp
# (thunder's) and /dev/shm (llama.cpp's) and removed. Results go to $OUT.
set -u
from=$1; shift
out=${OUT:-/tmp/gpu-out}
mkdir -p "$out" /tmp/gpu-bin /tmp/llama /dev/shm/m
unpack() { xz -dc "$1" 2>/dev/null || python3 -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())' "$1"; }
thunder=/tmp/gpu-bin/thunder bench=/tmp/llama/build/bin/llama-bench
[ -x "$thunder" ] || { unpack "$from/thunder.xz" > "$thunder"; chmod +x "$thunder"; }
if [ ! -x "$bench" ]; then
    unpack "$from/llama.tar.xz" | tar -xf - -C /tmp/llama
    cmake -S /tmp/llama/llama.cpp -B /tmp/llama/build -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real \
        -DGGML_CUDA_FA=ON -DGGML_CUDA_FA_ALL_QUANTS=OFF -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DBUILD_SHARED_LIBS=OFF > "$out/cmake.txt" 2>&1
    cmake --build /tmp/llama/build --target llama-bench -j "$(nproc)" > "$out/build.txt" 2>&1 || { tail -5 "$out/build.txt"; exit 1; }
fi
export PYTHONPATH=/tmp/llama/llama.cpp/gguf-py
for cell in "$@"; do
    IFS=: read -r shape bits layers <<< "$cell"
    [ "$bits" = 8 ] && type=q8_0 || type=q4_0
    ours=/tmp/m-$shape-$bits theirs=/dev/shm/m/$shape-$type.gguf
    timeout 240 "$thunder" model synth --arch "$shape" --bits "$bits" ${layers:+--layers "$layers"} "$ours" > "$out/synth.txt" 2>&1 & a=$!
    timeout 240 python3 "$from/gguf_model.py" "$shape${layers:+-$layers}" "$type" "$theirs" > "$out/gguf.txt" 2>&1 & b=$!
    wait $a $b
    echo "== $cell"
    timeout 90 "$thunder" bench decode --device gpu --prompt 480 --tokens 64 "$ours" 2>&1 | tail -9
    timeout 90 "$thunder" bench prefill --device gpu --prompt 2048 "$ours" 2>&1 | tail -4
    timeout 90 "$bench" -m "$theirs" -p 0 -n 64 -d 480 -fa 1 -ngl 99 -r 3 2>&1 | tail -3
    timeout 90 "$bench" -m "$theirs" -p 2048 -n 0 -fa 1 -ngl 99 -r 3 2>&1 | tail -3
    rm -rf "$ours" "$theirs"
done | tee "$out/cells.txt"
