#!/usr/bin/env bash
# Checks a shard set on the machine it is to run on. Needs bash, coreutils, python3 and mgtp.
set -o pipefail

usage() {
  cat <<'END'
usage: scripts/validate.sh DIR [TP] [DEVICES]

Checks the shard set DIR on this machine, one line a check:

  verify        every file has the size and hash that plan.json gives
  probe-memory  every rank loads and holds what the plan says, about 1/TP of the weights
  generate      a greedy generation from fixed token ids ends well, each rank with its own file
  repeat        the same generation again gives the same token ids
  tp 1          one rank alone gives the same: the same ids in float32 and float64; in 16 bits, where rounding may
                decide between two tokens, log-probabilities whose median difference is at most 0.25 up to the first
                token that differs. Writes a one-rank copy of DIR to a temporary folder; skipped where disk or device
                memory does not suffice for it, or DIR has one rank anyway

  TP       the number of ranks DIR must have (default: whatever it has)
  DEVICES  cpu, or indices of GPUs such as 0,2 (default: what mgtp chooses)

Exits with 0 when no check failed, 1 when one did, 2 on wrong usage.
Environment: MGTP, the command to run (default: mgtp) · TMPDIR, where the one-rank copy goes (default: /tmp)
END
}

# Ordinary tokens in every vocabulary: the lowest ids are often special ones, after which 16 bits are far off.
PROMPT_IDS=101,103,107,109,113,127,131,137
NUM_TOKENS=16

main() {
  if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
  if (($# < 1 || $# > 3)) || [[ $1 == -* || ! ${2:-1} =~ ^[1-9][0-9]*$ ]]; then usage >&2; exit 2; fi
  DIR=$1 TP=${2-} DEVICES=${3-}
  read -r -a MGTP <<<"${MGTP:-mgtp}"
  # A trap's commands run after `main` has returned: the folder's name must not be local to it.
  WORK=$(mktemp -d "${TMPDIR:-/tmp}/mgtp-validate.XXXXXX") || exit 1
  trap 'rm -rf "$WORK"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM

  RANK_OPTIONS=(${TP:+--tp-size "$TP"})
  case $DEVICES in
    "") ONE_DEVICE=() ;;
    cpu) RANK_OPTIONS+=(--device cpu) ONE_DEVICE=(--device cpu) ;;
    *) RANK_OPTIONS+=(--devices "$DEVICES") ONE_DEVICE=(--devices "${DEVICES%%,*}") ;;
  esac

  FAILED=0
  check verify verify
  check probe-memory probe_memory
  check generate generate
  check repeat repeat
  check "tp 1" compare_with_one_rank
  exit $((FAILED > 0))
}

# check NAME FUNCTION: runs it and prints one line. The function says what it found on stdout, what went wrong on
# stderr, and returns 0 (ok), 77 (does not apply here) or anything else (failed).
check() {
  local name=$1 found code
  found=$("$2" 2>"$WORK/errors")
  code=$?
  case $code in
    0) printf 'ok    %s: %s\n' "$name" "$found" ;;
    77) printf 'skip  %s: %s\n' "$name" "$found" ;;
    *)
      FAILED=$((FAILED + 1))
      found=${found:-$(grep -m 1 '^error:' "$WORK/errors")}
      printf 'FAIL  %s: %s\n' "$name" "${found:-exit code $code}"
      sed 's/^/      /' "$WORK/errors" >&2
      ;;
  esac
}

verify() {
  "${MGTP[@]}" verify "$DIR" >/dev/null && echo "sizes and hashes are those of plan.json"
}

probe_memory() {
  "${MGTP[@]}" probe-memory "$DIR" "${RANK_OPTIONS[@]}" --json >"$WORK/memory.json" || return
  python3 - "$WORK/memory.json" <<'END'
import json, sys
memory = json.load(open(sys.argv[1]))
shares = ", ".join(f"{rank['share']:.1%}" for rank in memory["ranks"])
print(f"the ranks hold {shares} of {memory['total_weight_bytes'] / 1e9:.2f} GB")
sys.exit(not memory["within_plan"])
END
}

# greedy FOLDER OUTPUT [OPTION ...]: the fixed generation, its JSON document in OUTPUT.
greedy() {
  local folder=$1 output=$2
  shift 2
  "${MGTP[@]}" generate "$folder" "$@" --prompt-ids "$PROMPT_IDS" --temperature 0 --max-tokens "$NUM_TOKENS" \
    --ignore-eos --logprobs 0 --json >"$output"
}

generate() {
  greedy "$DIR" "$WORK/first.json" "${RANK_OPTIONS[@]}" || return
  python3 - "$WORK/first.json" "$NUM_TOKENS" <<'END'
import json, sys
run, wanted = json.load(open(sys.argv[1])), int(sys.argv[2])
files = {rank["file"] for rank in run["ranks"]}
print(f"{len(run['token_ids'])} tokens from {len(run['ranks'])} process(es)")
sys.exit(len(run["token_ids"]) != wanted or len(files) != len(run["ranks"]))
END
}

repeat() {
  [[ -s $WORK/first.json ]] || { echo "nothing to compare with"; return 77; }
  greedy "$DIR" "$WORK/second.json" "${RANK_OPTIONS[@]}" || return
  compare "$WORK/first.json" "$WORK/second.json" float32
}

compare_with_one_rank() {
  local code dtype ranks needed free
  [[ -s $WORK/first.json ]] || { echo "nothing to compare with"; return 77; }
  read -r ranks dtype needed < <(describe) || return
  ((ranks > 1)) || { echo "the set has one rank"; return 77; }
  free=$(df --output=avail -B1 "$WORK" | tail -n 1)
  if ((needed > free)); then
    echo "a one-rank copy needs $needed bytes, ${TMPDIR:-/tmp} has $free free (hint: set TMPDIR)"
    return 77
  fi
  "${MGTP[@]}" shard "$DIR" --tp-size 1 --out "$WORK/tp1" >/dev/null || return
  greedy "$WORK/tp1" "$WORK/one.json" "${ONE_DEVICE[@]}"
  code=$?
  if ((code == 4)); then
    echo "one rank alone does not fit: $(grep -m 1 '^error:' "$WORK/errors")"
    return 77
  fi
  ((code == 0)) && compare "$WORK/first.json" "$WORK/one.json" "$dtype"
}

# Prints the number of ranks, the dtype, and the bytes of all rank files of DIR.
describe() {
  python3 - "$DIR" <<'END'
import json, os, sys
folder = sys.argv[1]
plan = json.load(open(os.path.join(folder, "plan.json")))
files = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
print(plan["tp_size"], plan["dtype"], sum(os.path.getsize(os.path.join(folder, name)) for name in files))
END
}

# compare FIRST SECOND DTYPE: token ids and log-probabilities of two greedy runs.
compare() {
  python3 - "$@" <<'END'
import json, statistics, sys
first, second = (json.load(open(name)) for name in sys.argv[1:3])
is_exact = sys.argv[3] in ("float32", "float64")
pairs = list(zip(first["token_ids"], second["token_ids"]))
same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
scores = [[token["logprob"] for token in run["logprobs"]] for run in (first, second)]
differences = [abs(a - b) for a, b in list(zip(*scores))[: same + 1]]
apart = statistics.median(differences)
print(f"{same} of {len(pairs)} token ids agree, log-probabilities differ by {apart:.2g} (median)")
is_same_length = len(first["token_ids"]) == len(second["token_ids"])
if is_exact:
    is_good = same == len(pairs) and max(differences) <= 1e-3
else:
    is_good = apart <= 0.25
sys.exit(not (is_same_length and is_good))
END
}

main "$@"
