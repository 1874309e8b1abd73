"""Runs the tests of this folder through Triton's interpreter, which is chosen when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
# bfloat16 is emulated, slowly: attention in float32 shows the same faults.
SELECTION = "not (bfloat16 and attention)"


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="these tests run interpreted already")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTION, "--timeout=600"]
    command += ["-m", "not cuda", str(Path(__file__).parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
