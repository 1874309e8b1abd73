"""The whole fault matrix."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests import fault_matrix

pytestmark = [pytest.mark.soak]


@pytest.mark.parametrize("case", fault_matrix.all_cases(), ids=str)
def test_matrix(case, tiny_checkpoint, sharded):
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        fault_matrix.run(case, Path(folder), sharded(tiny_checkpoint("base"), 2))
