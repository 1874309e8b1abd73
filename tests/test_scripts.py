"""The scripts for people, scripts/validate.sh and scripts/rank_maps.py: stand-ins for `mgtp` show that they notice faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

STAND_IN = """
import json, os, sys
command, folder, *rest = sys.argv[1:]
fault = os.environ.get("FAULT", "")
one = folder.endswith("tp1")
open(os.environ["LOG"], "a").write(" ".join([command, "tp1" if one else "set", *rest]) + "\\n")
if fault == command or (fault == "memory" and one and command == "generate"):
    print(f"error: no {fault}", file=sys.stderr)
    sys.exit(4 if fault == "memory" else 5)
ranks = [{"rank": r, "share": 0.5, "file": f"rank-{0 if fault == 'files' else r}-of-2"} for r in range(1 if one else 2)]
if command == "probe-memory":
    print(json.dumps({"tp_size": 2, "total_weight_bytes": 10**9, "ranks": ranks, "within_plan": fault != "plan"}))
if command == "generate":
    ids, logprob = list(range(16)), -0.5
    if one and fault in ("ids", "logprobs"):
        ids[5], logprob = 99, -0.6 if fault == "ids" else -1.5
    print(json.dumps({"token_ids": ids, "ranks": ranks, "logprobs": [{"logprob": logprob}] * 16}))
"""


def validate(tmp_path: Path, *arguments: str, fault: str = "", dtype: str = "float32", ranks: int = 2):
    """Run validate.sh on a pretended shard set; gives (exit code, its lines, the commands it ran)."""
    folder = tmp_path / "set"
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(f'{{"tp_size": {ranks}, "dtype": "{dtype}"}}')
    (folder / "rank-0-of-2.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "mgtp.py").write_text(STAND_IN)
    log = tmp_path / "log"
    log.write_text("")
    environment = {**os.environ, "MGTP": f"{sys.executable} {tmp_path}/mgtp.py", "FAULT": fault, "LOG": str(log)}
    command = ["bash", str(SCRIPTS / "validate.sh"), str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment, "TMPDIR": str(tmp_path)}, timeout=60
    )
    assert not list(tmp_path.glob("mgtp-validate.*")), "it leaves no temporary folder"
    return done.returncode, done.stdout.splitlines(), log.read_text().splitlines()


def verdicts(lines: list[str]) -> list[str]:
    return [line.split(":")[0] for line in lines]


def test_validate_passes_a_good_set(tmp_path: Path) -> None:
    code, lines, commands = validate(tmp_path, "2", "0,2")
    assert code == 0
    assert verdicts(lines) == ["ok    verify", "ok    probe-memory", "ok    generate", "ok    repeat", "ok    tp 1"]
    assert any(c.startswith("probe-memory set --tp-size 2 --devices 0,2") for c in commands)
    assert any(c.startswith("generate tp1 --devices 0 ") for c in commands)


@pytest.mark.parametrize(
    ("fault", "dtype", "line"),
    [
        ("verify", "float32", "FAIL  verify"),
        ("probe-memory", "float32", "FAIL  probe-memory"),
        ("plan", "float32", "FAIL  probe-memory"),
        ("generate", "float32", "FAIL  generate"),
        ("files", "float32", "FAIL  generate"),
        ("shard", "float32", "FAIL  tp 1"),
        ("ids", "float32", "FAIL  tp 1"),
        ("logprobs", "bfloat16", "FAIL  tp 1"),
    ],
)
def test_validate_sees_every_fault(tmp_path: Path, fault: str, dtype: str, line: str) -> None:
    code, lines, _ = validate(tmp_path, fault=fault, dtype=dtype)
    assert code == 1
    assert [verdict for verdict in verdicts(lines) if verdict.startswith("FAIL")] == [line]


def test_validate_accepts_near_ties_in_16_bits(tmp_path: Path) -> None:
    code, lines, _ = validate(tmp_path, fault="ids", dtype="bfloat16")
    assert (code, lines[-1]) == (0, "ok    tp 1: 5 of 16 token ids agree, log-probabilities differ by 0.1 (median)")


def test_validate_skips_what_does_not_fit(tmp_path: Path) -> None:
    assert validate(tmp_path, fault="memory")[1][-1] == "skip  tp 1: one rank alone does not fit: error: no memory"
    assert validate(tmp_path, ranks=1)[1][-1] == "skip  tp 1: the set has one rank"


def test_validate_help_and_wrong_usage() -> None:
    def run(*arguments: str) -> int:
        return subprocess.run(["bash", SCRIPTS / "validate.sh", *arguments], capture_output=True, timeout=60).returncode

    assert [run("--help"), run(), run("--fast"), run("set", "two"), run("set", "2", "cpu", "x")] == [0, 2, 2, 2, 2]


def test_validate_passes_a_real_set(sharded: Callable[..., str], tiny_checkpoint: Callable[[str], Path]) -> None:
    """The same script with the real program: commands, options and JSON keys are those it relies on."""
    folder = sharded(tiny_checkpoint("base"), 2)
    environment = {**os.environ, "MGTP": f"{sys.executable} -m mgtp.cli"}
    command = ["bash", str(SCRIPTS / "validate.sh"), folder, "2", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [verdict.split()[0] for verdict in verdicts(done.stdout.splitlines())] == ["ok"] * 5


# --- rank_maps.py -----------------------------------------------------------------------------------------------------

RANK = """
import mmap, sys, time
files = [open(path, "rb") for path in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
time.sleep(1)
"""
FRONT = """
import os, subprocess, sys
code, exit_code, *files = sys.argv[1:]
ranks = []
for rank, names in enumerate(files):
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(files))}
    ranks.append(subprocess.Popen([sys.executable, "-c", code, *names.split()], env=environment))
for rank in ranks:
    rank.wait()
sys.exit(int(exit_code))
"""


def rank_maps(tmp_path: Path, *files: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    for rank in range(2):
        (tmp_path / f"rank-{rank}-of-2.safetensors").write_bytes(bytes(100))
    command = [sys.executable, SCRIPTS / "rank_maps.py", sys.executable, "-c", FRONT, RANK, str(code), *files]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_rank_maps_tells_own_files_from_others(tmp_path: Path) -> None:
    own, other = "rank-0-of-2.safetensors", "rank-1-of-2.safetensors"
    good = rank_maps(tmp_path, own, other)
    assert good.returncode == 0
    assert "2 processes, each opened its own file and no other" in good.stdout
    assert rank_maps(tmp_path, own, f"{other} {own}").returncode == 1, "one that also has another's"
    assert rank_maps(tmp_path, other, own).returncode == 1, "swapped"
    assert "no rank file" in rank_maps(tmp_path, own, "").stdout
    assert rank_maps(tmp_path, own, other, code=5).returncode == 5, "the command's own failure"
