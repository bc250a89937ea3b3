#!/bin/bash
# Thunderhead's server against llama.cpp's, under the same load: the same GGUF file, the same
# threads, in turn. Prints a table for docs/performance.md.
#
#   bench/llama_server.sh [SHAPE [TYPE]]        SHAPE: qwen3-0.6b (default), as of llama_cpp.sh
#
# LLAMA_SERVER: a llama-server that is there already; else llama_cpp.sh builds one (25 minutes).
# MODEL: a GGUF file that is there already; else llama_cpp.sh writes one of SHAPE and TYPE.
# THUNDER: the thunder to measure (target/release/thunder). THREADS: of each server (all cores).
# With the first three, nothing is compiled and nothing downloaded.
# CLIENTS (1,4,16,64), PROMPT and TOKENS: words and tokens of a request (100, 32). SHARED: words at
# the beginning of all prompts, one table for each (0 400). RATE: requests per second at random
# times (Poisson) in place of CLIENTS, e.g. 0.2,0.4, with SLOTS (16) that decode together. RUNS: of
# each cell, the median counts (1). OUT: folder for the JSON of every run (a temporary one). MORE:
# further options of `thunder serve`, e.g. "--step-time 0".
#
# The load generator runs on the same machine and is a part of both figures. The machine should do
# nothing else.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
thunder=${THUNDER:-$here/../target/release/thunder}
threads=${THREADS:-$(nproc)}
clients=${CLIENTS:-1,4,16,64}
prompt=${PROMPT:-100} tokens=${TOKENS:-32} runs=${RUNS:-1}
out=${OUT:-$(mktemp -d)}
# As many requests decode together as there are clients, on both; contexts have the same room.
slots=$(tr , '\n' <<<"$clients" | sort -n | tail -1)
load=(--clients "$clients")
if [ -n "${RATE:-}" ]; then slots=${SLOTS:-16} load=(--rate "$RATE"); fi
read -ra more <<<"${MORE:-}"
file=${MODEL:-$("$here/llama_cpp.sh" model "${1:-qwen3-0.6b}" "${2:-q4_0}")}
for program in "$thunder" "${LLAMA_SERVER:-}"; do
  [ -z "$program" ] || [ -x "$program" ] || { echo "$program is not there, or no program" >&2; exit 1; }
done
server=${LLAMA_SERVER:-$("$here/llama_cpp.sh" server)}
mkdir -p "$out"
pid=
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null || true' EXIT

# Waits until the server at port $1 answers; its log is $2.
ready() {
  for _ in $(seq 600); do
    if curl --silent --fail --output /dev/null "http://127.0.0.1:$1/health"; then return; fi
    kill -0 "$pid" 2>/dev/null || { tail -5 "$2" >&2; exit 1; }
    sleep 0.2
  done
  echo "the server did not start within 120 s: $2" >&2
  exit 1
}

# Measures server $1 (thunder or llama.cpp) with $2 shared words: run $3.
measure() {
  local context=$(((7 * ($2 + prompt) + tokens + 256) / 32 * 32)) port=18573 log=$out/$1.log
  case $1 in
    thunder)
      "$thunder" serve "$file" --port $port --no-store --threads "$threads" --max-batch "$slots" --context "$context" ${more[@]+"${more[@]}"} >"$log" 2>&1 &
      ;;
    llama.cpp)
      "$server" -m "$file" --host 127.0.0.1 --port $port -t "$threads" -tb "$threads" -np "$slots" \
        -c $((slots * context)) --no-webui >"$log" 2>&1 &
      ;;
  esac
  pid=$!
  ready $port "$log"
  "$thunder" bench serve http://127.0.0.1:$port "${load[@]}" --prompt "$prompt" --shared "$2" --tokens "$tokens" \
    --json >"$out/$1-$2-$3.json"
  kill "$pid" && wait "$pid" 2>/dev/null || true
  pid=
}

for shared in ${SHARED:-0 400}; do
  for run in $(seq "$runs"); do
    for one in thunder llama.cpp; do measure "$one" "$shared" "$run"; done
  done
done

python3 - "$out" "$runs" ${SHARED:-0 400} <<'PYTHON'
import json, statistics, sys

out, runs, *shared = sys.argv[1:]
COLUMNS = [("tok/s", lambda row: row["tokens_per_s"], 1)]
COLUMNS += [(f"first token {p}, ms", lambda row, p=p: row["time_to_first_token_ms"][p], -1) for p in ("p50", "p99")]
COLUMNS += [(f"between tokens {p}, ms", lambda row, p=p: row["between_tokens_ms"][p], -1) for p in ("p50", "p99")]
print("| shared words | clients, or requests/s | " + " | ".join(f"{name}: thunder, llama.cpp (ratio)" for name, _, _ in COLUMNS) + " |")
print("|---" * (2 + len(COLUMNS)) + "|")
for words in shared:
    of = {one: [json.load(open(f"{out}/{one}-{words}-{run + 1}.json"))["rows"] for run in range(int(runs))] for one in ("thunder", "llama.cpp")}
    for index, row in enumerate(of["thunder"][0]):
        cells = []
        for _, value, sign in COLUMNS:
            ours, theirs = (statistics.median(value(rows[index]) for rows in of[one]) for one in ("thunder", "llama.cpp"))
            ratio = (ours / theirs if sign > 0 else theirs / ours) if ours and theirs else float("nan")
            cells.append(f"{ours:.3g}, {theirs:.3g} ({ratio:.2f})")
        failed = {one: sum(sum(rows[index]["errors"].values()) for rows in of[one]) for one in of}
        note = "".join(f"; {count} errors of {one}" for one, count in failed.items() if count)
        print(f"| {words} | {row['clients'] or row['rate_per_s']}{note} | " + " | ".join(cells) + " |")
print("\nA ratio above 1 is better for thunder.")
PYTHON
