"""Kernels run on the CPU through Triton's interpreter, and on a GPU where there is one."""

import os
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)])


@pytest.fixture(autouse=True)
def _runnable(request: pytest.FixtureRequest) -> None:
    """The interpreter is chosen when triton is imported: one process tests one way."""
    import torch

    if request.node.path.name == "test_interpreted.py":
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
    if device == "cpu" and not interpreted:
        pytest.skip("runs in test_interpreted.py's own process")
    if device == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device")
