#!/usr/bin/env bash
# Runs the kernels of the oneshot backend under compute-sanitizer, two ranks on the first GPU: memory errors, then races.
# usage: benchmarks/sanitize_collectives.sh [TOOL...]   (default: memcheck racecheck). LIMIT: seconds for each (240).
# Exits with 0 when no tool found anything, 1 when one did or did not end in time.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
if [[ ${1-} == -* ]]; then sed -n 's/^# //p' "$0" >&2; exit 2; fi
command -v compute-sanitizer >/dev/null || { echo "error: compute-sanitizer is missing (hint: it comes with CUDA)" >&2; exit 2; }
(($#)) || set -- memcheck racecheck
log=$(mktemp) || exit 2
trap 'rm -f "$log"' EXIT
status=0
for tool in "$@"; do
  echo "== $tool"
  api=()
  [[ $tool == memcheck ]] && api=(--report-api-errors no) # torch asks whether memory can be shared over a fabric
  JOB_SECONDS=$((${LIMIT:-240} - 20)) timeout -k 5 "${LIMIT:-240}" \
    compute-sanitizer --tool "$tool" "${api[@]}" --target-processes all --error-exitcode 9 --print-limit 20 \
    "${PYTHON:-python3}" -m tests.cuda.sanitized_collectives 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  # One summary for all processes; without one the tool could not watch them, and without sums they did nothing.
  clean=$(grep -cE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log")
  sums=$(grep -c 'every sum was right' "$log")
  echo "== $tool: exit code $code, $clean summary without errors, sums right: $sums"
  ((code == 0 && clean >= 1 && sums >= 1)) || status=1
done
exit "$status"
