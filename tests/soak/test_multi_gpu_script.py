"""benchmarks/multi_gpu.sh on ranks of the CPU: every part runs, and one document has what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "multi_gpu.sh"
PARTS = ["large", "ids", "scaling", "context", "ends", "scaling_large", "load", "probe"]


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MGTP": f"{sys.executable} -m mgtp.cli", "PYTHON": sys.executable}
    return subprocess.run([str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.timeout(700)
def test_every_part_runs_on_the_cpu(tmp_path):
    out = tmp_path / "out.json"
    run = script(str(out), "--device", "cpu")
    document = json.loads(out.read_text())
    assert set(document) == {"date", "commit", "tree_changed", "command", "hardware", "parts"}
    assert len(document["commit"]) == 40
    assert list(document["parts"]) == PARTS
    assert [part["error"] for part in document["parts"].values()] == [""] * len(PARTS), run.stdout
    wrong = [c["what"] for part in document["parts"].values() for c in part["checks"] if not c["holds"]]
    # Goals of speed are for GPUs.
    assert all("times as fast" in what or "within 15 s" in what for what in wrong), run.stdout
    checked = [c["what"] for part in document["parts"].values() for c in part["checks"]]
    for what in ("tp 2 host are those of tp 1", "cp 2 are those of tp 1", "everything is gone", "what was written"):
        assert any(what in each for each in checked), what


def test_a_part_that_fails_is_noted_and_the_next_one_runs(tmp_path):
    out = tmp_path / "out.json"
    run = script(str(out), "--device", "cpu", "--parts", "probe,large", "--tp-size", "99")
    parts = json.loads(out.read_text())["parts"]
    assert run.returncode == 1 and list(parts) == ["probe", "large"]
    assert "99" in parts["probe"]["error"], run.stdout
    wrong = [check["what"] for check in parts["large"]["checks"] if not check["holds"]]
    assert wrong == ["probe-memory", "serve", "generate"] and not parts["large"]["error"], run.stdout


def test_parts_beyond_the_budget_are_left_out(tmp_path):
    out = tmp_path / "out.json"
    run = script(str(out), "--device", "cpu", "--parts", "probe", "--budget", "0")
    assert run.returncode == 1 and "no time left" in json.loads(out.read_text())["parts"]["probe"]["error"]


@pytest.mark.parametrize(
    "arguments", [(), ("--out",), ("out.json", "--parts", "nothing"), ("out.json", "--device", "tpu")]
)
def test_wrong_usage(arguments):
    run = script(*arguments)
    assert run.returncode == 2 and run.stderr.startswith("usage:")
