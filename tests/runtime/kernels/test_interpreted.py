"""Runs the tests of this folder through Triton's interpreter, which is chosen when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases import at_least

REPOSITORY = Path(__file__).parents[3]
# The interpreter calls int() on arrays of one element, which numpy refuses from 2.4 on; Triton 3.7 mended that (its issue 9171).
LOOPS_FAIL = at_least("numpy", "2.4") and not at_least("triton", "3.7")
# bfloat16 is emulated, slowly, and float32 shows the same faults but for those of rounding.
SELECTIONS = [
    pytest.param("float32 and (add_rms_norm or activation or sum) or nan or ends", id="share"),
    pytest.param("not bfloat16 or add_rms_norm", marks=pytest.mark.soak, id="all"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="these tests run interpreted already")
@pytest.mark.skipif(LOOPS_FAIL, reason="Triton before 3.7 cannot interpret a loop with numpy 2.4 or later")
def test_kernels_in_the_interpreter(selection):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, "--timeout=600"]
    command += ["-m", "not cuda", str(Path(__file__).parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
