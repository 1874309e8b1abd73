"""`mgtp shard` killed with -9 at fifty random moments, some of them again while it continues."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crashes import content, killed_after, run_seconds
from tests.tiny import write_llama

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def test_fifty_kills(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", hidden=1024, ffn=4096, layers=8, vocab=16000, dtype="bfloat16")
    command = ["shard", str(model), "--tp-size", "4", "--out"]
    seconds = run_seconds(*command, str(tmp_path / "undisturbed"))
    expected = content(tmp_path / "undisturbed")
    choose = random.Random(50)
    out, kills = tmp_path / "out", 0
    while kills < 50:
        while killed_after(choose.uniform(0.1, 1.1) * seconds, *command, str(out)):
            kills += 1
            if out.exists() and content(out) == expected:
                break  # killed after all was done
        assert content(out) == expected
        for path in out.iterdir():
            path.unlink()
