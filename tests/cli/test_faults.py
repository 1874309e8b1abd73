"""A share of the fault matrix (all of it is in `make soak`), and signals to the front at every stage."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests import fault_matrix


@pytest.fixture
def run_folder():
    """Shorter than pytest's own: the paths of Unix sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("case", fault_matrix.share(4, seed=7), ids=str)
def test_share_of_the_matrix(case, run_folder, tiny_checkpoint, sharded):
    fault_matrix.run(case, run_folder, sharded(tiny_checkpoint("base"), 2))


RING = ("--cp-size", "2", "--prompt-tokens", "60", "--max-batch-tokens", "20", "--block-size", "4")


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("kill", 1),
        pytest.param("hang", 0, marks=pytest.mark.soak),
        *(pytest.param(f, 1, marks=pytest.mark.soak) for f in ("raise", "exit", "stop", "hang")),
    ],
)
def test_a_rank_that_fails_while_keys_go_round_the_ring(fault, rank, run_folder, tiny_checkpoint, sharded):
    case = fault_matrix.Case("running", fault, rank, "bench", RING, place="ring")
    fault_matrix.run(case, run_folder, sharded(tiny_checkpoint("base"), 1))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_rank_that_hangs_in_a_step_is_told_from_those_that_wait_for_it(rank, run_folder, tiny_checkpoint, sharded):
    """One of two ranks does not come to a collective in which the other waits: Python's stacks tell which."""
    case = fault_matrix.Case("running", "hang", rank, "serve")
    fault_matrix.run(case, run_folder, sharded(tiny_checkpoint("base"), 2))
