"""Ranks as threads of the test's own process: quick to start, for tests of many small models.

    run_in_threads(tp_size, job, *args) -> the results of job(communicator, *args), in rank order
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

SECONDS = 60


class ThreadCommunicator:
    """The communicator of one of several threads, which meet at a barrier before and after they read one another."""

    backend = "threads"

    def __init__(self, rank: int, barrier: Barrier, board: list[torch.Tensor | None]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, barrier.parties, barrier, board

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        return tensor.copy_(self.all_gather(tensor).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape] in rank order."""
        self._board[self.rank] = tensor
        self._barrier.wait(SECONDS)
        gathered = torch.stack([part for part in self._board if part is not None])
        self._barrier.wait(SECONDS)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`source`'s tensor, in place."""
        return tensor.copy_(self.all_gather(tensor)[source])


def run_in_threads(tp_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """job(communicator, *args) on `tp_size` ranks at once. Raises what a rank raised first."""
    barrier, board = Barrier(tp_size), [None] * tp_size

    def run(rank: int) -> Any:
        try:
            return job(ThreadCommunicator(rank, barrier, board), *args)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(tp_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(tp_size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        # The others only report that the barrier broke.
        for error in sorted(errors, key=lambda e: type(e).__name__ == "BrokenBarrierError"):
            raise error
        return [future.result() for future in futures]
