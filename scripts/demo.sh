#!/usr/bin/env bash
# `make demo`: a small real model, cut into two rank files, chats from two processes on the CPU.
# Needs mgtp on PATH. MGTP_MODELS is where the model is or will be put (default .models).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODELS=${MGTP_MODELS:-.models}
MODEL=$MODELS/SmolLM2-135M-Instruct.Q4_1.gguf
SHARDS=.demo/smollm2-tp2
PROMPT="What is the capital of France?"

heading() { printf '\n== %s\n\n' "$*"; }

# Prints a command as a person would type it, then runs it.
run() {
  local argument line='$'
  for argument in "$@"; do
    [[ $argument =~ ^[A-Za-z0-9_./=:,-]+$ ]] || argument="\"$argument\""
    line+=" $argument"
  done
  printf '%s\n' "$line"
  "$@"
}

heading "1. The model: SmolLM2-135M-Instruct, 9 query heads and 3 key/value heads, which two ranks cannot halve"
run python scripts/fetch_models.py "$MODELS"

heading "2. What each of two ranks would get"
run mgtp plan "$MODEL" --tp-size 2 --dtype float32

heading "3. One file per rank"
if [[ -e $SHARDS/plan.json ]] && run mgtp verify "$SHARDS"; then
  echo "(written by an earlier run; delete .demo to see it made)"
else
  rm -rf "$SHARDS"
  run mgtp shard "$MODEL" --tp-size 2 --dtype float32 --out "$SHARDS"
fi

heading "4. A chat answer from two processes, and the files each of them opens meanwhile (from /proc/PID/maps)"
run python scripts/rank_maps.py mgtp generate "$SHARDS" --device cpu --chat --prompt "$PROMPT" --max-tokens 64 --temperature 0

heading "5. What each rank really holds"
run mgtp probe-memory "$SHARDS" --device cpu

printf '\nThe shard set is in %s. Ask it something else:\n' "$SHARDS"
printf '  .venv/bin/mgtp generate %s --device cpu --chat --prompt "..."\n' "$SHARDS"
