#!/usr/bin/env bash
# Runs the project's commands on several GPUs and leaves one JSON document. Needs bash, coreutils, python3 and mgtp.
set -uo pipefail

usage() {
  cat <<'END'
usage: benchmarks/multi_gpu.sh OUT.json [TP_SIZES] [DEVICE] [CONFIG...]

Runs, for each of TP_SIZES (default: 2) on DEVICE (default: cuda; cpu tries the script out):

  probe      links, and every backend of the collectives from 1 KiB to 64 MiB
  bench      each CONFIG (a config.json; default: benchmarks/llama_8b.json) with random weights, tp 1 and every tp size,
             over every backend that the device allows: decode steps, prefill, the collectives' share of a step

OUT.json holds date, commit, hardware, and of every command its arguments, exit code, seconds and output. A command that
fails is noted and the next one runs.

Environment: MGTP, the command to run (default: mgtp) · LIMIT, seconds for a command (default: 300) · SHARED=1 puts all
ranks on the first GPU · BATCHES, PREFILLS, PROMPT, OUTPUT: what bench measures (defaults: 1,8,32,128 1x8000 512 64)
Exits with 0 when every command did, 1 when one failed, 2 on wrong usage.
END
}

FAILED=0

# run COMMAND...: append a JSON line with what it gave
run() {
  local begin end code
  begin=$(date +%s.%N)
  timeout "${LIMIT:-300}" "${MGTP[@]}" "$@" >"$WORK/out" 2>"$WORK/err"
  code=$?
  end=$(date +%s.%N)
  ((code == 0)) || FAILED=1
  echo "mgtp $* -> $code" >&2
  python3 - "$WORK" "$code" "$begin" "$end" "$@" <<'END' >>"$WORK/runs"
import json, pathlib, sys
work, code, begin, end, *arguments = sys.argv[1:]
out = pathlib.Path(work, "out").read_text()
try:
    out = json.loads(out)
except ValueError:
    pass
err = pathlib.Path(work, "err").read_text().splitlines()[-8:]
seconds = round(float(end) - float(begin), 2)
print(json.dumps({"arguments": arguments, "exit_code": int(code), "seconds": seconds, "output": out, "stderr": err}))
END
}

main() {
  if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
  if (($# < 1)) || [[ $1 == -* || ! ${2:-2} =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ || ! ${3:-cuda} =~ ^(cuda|cpu)$ ]]; then
    usage >&2
    exit 2
  fi
  local out=$1 device=${3:-cuda} tp_sizes configs backends tp backend config
  IFS=, read -r -a tp_sizes <<<"${2:-2}"
  configs=("${@:4}")
  ((${#configs[@]})) || configs=("$(dirname "$0")/llama_8b.json")
  read -r -a MGTP <<<"${MGTP:-mgtp}"
  WORK=$(mktemp -d "${TMPDIR:-/tmp}/mgtp-multi.XXXXXX") || exit 1
  trap 'rm -rf "$WORK"' EXIT
  local place=(--device "$device") what=(--requests 0 --batches "${BATCHES:-1,8,32,128}" --prefills "${PREFILLS-1x8000}")
  what+=(--prompt-tokens "${PROMPT:-512}" --output-tokens "${OUTPUT:-64}" --dummy-weights --json)
  backends=(nccl oneshot)
  if [[ ${SHARED-} == 1 ]]; then place+=(--devices 0 --allow-shared-device) backends=(host oneshot); fi
  [[ $device == cpu ]] && backends=(host)
  for tp in "${tp_sizes[@]}"; do run probe --tp-size "$tp" "${place[@]}" --json; done
  for config in "${configs[@]}"; do
    run bench "$config" --tp-size 1 --device "$device" "${what[@]}"
    for tp in "${tp_sizes[@]}"; do
      for backend in "${backends[@]}"; do
        run bench "$config" --tp-size "$tp" "${place[@]}" --collective "$backend" --collectives "${what[@]}"
      done
    done
  done
  python3 - "$WORK/runs" "$(dirname "$0")" <<'END' >"$out"
import datetime, json, os, pathlib, platform, subprocess, sys

def output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=sys.argv[2]).stdout.strip()
    except OSError:
        return ""

gpus = output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()
runs = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "gpus": gpus}
now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
print(json.dumps({"date": now, "commit": output("git", "rev-parse", "HEAD"), "hardware": hardware, "runs": runs}, indent=1))
END
  exit "$FAILED"
}

main "$@"
