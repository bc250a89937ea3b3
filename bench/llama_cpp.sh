#!/bin/bash
# llama.cpp as the peer of Thunderhead's measurements: its llama-bench on a model of the same shape
# and bits.
#
#   bench/llama_cpp.sh build                        build llama-bench and print its path (9 minutes)
#   bench/llama_cpp.sh model [SHAPE [TYPE]]         write a GGUF with random weights, print its path
#   bench/llama_cpp.sh run [SHAPE [TYPE [ARG...]]]  both, then decode 64 tokens with one thread
#   bench/llama_cpp.sh rpc [SHAPE [TYPE [ARG...]]]  the same over two RPC servers
#   bench/llama_cpp.sh server                       build llama-server, print its path (25 minutes)
#
# SHAPE: llama-1b (default), llama-8b, qwen3-0.6b, qwen3-30b-a3b, gpt-oss-20b, deepseek-v2-lite;
# qwen3-30b-a3b-12 has its first 12 layers.
# TYPE: q4_0 (4.5 bits a weight, like MLX's 4 bits in groups of 64), q4_1 (5 bits, groups of 32),
# q8_0, q4_k, q6_k, q4_k_m (some matrices Q6_K), mxfp4 (experts; Q8_0 for the rest). ARG: options of llama-bench, added after `-p 0 -n 64 -t 1`.
#
# The source comes from the package llama-cpp-python on PyPI; this repository keeps none of it. AMX
# selects the build:
#   on       Sapphire Rapids with AMX, by clang 16 (gcc 12's build crashes); builds on any machine
#   off      the same without AMX
#   native   what this CPU has, by the system's compiler
# The default is `on` if this CPU has AMX, else `native`. JOBS: compilers at once.
set -euo pipefail

version=${LLAMA_CPP_PYTHON_VERSION:-0.3.36}
cache=${THUNDER_LLAMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/thunderhead/llama.cpp}
amx=${AMX:-$(if grep -qwm1 amx_int8 /proc/cpuinfo; then echo on; else echo native; fi)}
here=$(cd "$(dirname "$0")" && pwd)
build=$cache/build-$version-amx-$amx
venv=$cache/venv
bench=$build/bin/llama-bench rpc_server=$build/bin/ggml-rpc-server

venv() {
  [ -x "$venv/bin/cmake" ] && return
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet cmake ninja gguf numpy
}

source_tree() {
  local tree=$cache/llama_cpp_python-$version
  if [ ! -d "$tree" ]; then
    # pip would build cmake from source too if every package had to come as source.
    "$venv/bin/pip" download --quiet --no-binary llama-cpp-python --no-deps \
      --dest "$cache" "llama-cpp-python==$version" >&2
    tar -xzf "$cache/llama_cpp_python-$version.tar.gz" -C "$cache"
    rm "$cache/llama_cpp_python-$version.tar.gz"
  fi
  echo "$tree/vendor/llama.cpp"
}

build() {
  local targets=("$@") missing=
  for target in "${targets[@]}"; do [ -x "$build/bin/$target" ] || missing=1; done
  [ -n "$missing" ] || return 0
  mkdir -p "$cache"
  venv
  local options=(-DGGML_NATIVE=ON)
  if [ "$amx" != native ]; then
    if ! command -v clang-16 >/dev/null; then
      apt-get update -q
      apt-get install -q -y --no-install-recommends clang-16 libomp-16-dev
    fi
    # What GGML_NATIVE finds on a Sapphire Rapids, so that it can be built elsewhere.
    options=(-DCMAKE_C_COMPILER=clang-16 -DCMAKE_CXX_COMPILER=clang++-16 -DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON
      -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX_VNNI=ON -DGGML_AVX512=ON
      -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON)
    if [ "$amx" = on ]; then options+=(-DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON); fi
  fi
  PATH=$venv/bin:$PATH cmake -G Ninja -S "$(source_tree)" -B "$build" -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=OFF "${options[@]}" \
    -DGGML_RPC=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TOOLS=ON
  "$venv/bin/cmake" --build "$build" --target "${targets[@]}" -j "${JOBS:-1}"
}

model() {
  local file=$cache/$1-$2.gguf
  [ -s "$file" ] || { venv && "$venv/bin/python" "$here/gguf_model.py" "$1" "$2" "$file.part" && mv "$file.part" "$file"; }
  echo "$file"
}

case ${1:-} in
  build) build llama-bench ggml-rpc-server && echo "$bench" ;;
  server) build llama-server >&2 && echo "$build/bin/llama-server" ;;
  model) mkdir -p "$cache" && model "${2:-llama-1b}" "${3:-q4_0}" ;;
  run)
    build llama-bench
    file=$(model "${2:-llama-1b}" "${3:-q4_0}")
    shift $(($# > 3 ? 3 : $#))
    exec "$bench" -m "$file" -p 0 -n 64 -t 1 "$@"
    ;;
  rpc)
    build llama-bench ggml-rpc-server
    file=$(model "${2:-llama-1b}" "${3:-q4_0}")
    shift $(($# > 3 ? 3 : $#))
    servers=()
    trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
    for port in 50852 50853; do
      "$rpc_server" --host 127.0.0.1 --port $port --threads 1 >"$cache/rpc-$port.log" 2>&1 &
      servers+=($!)
    done
    sleep 2
    for split in layer tensor; do
      "$bench" -m "$file" -p 0 -n 64 -t 1 --rpc 127.0.0.1:50852,127.0.0.1:50853 -ngl 99 -sm $split "$@" || exit
    done
    ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
