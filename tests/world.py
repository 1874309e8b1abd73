"""A long-lived world of rank processes for tests: torch is imported once, every test borrows the first N ranks."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

JOB_SECONDS = 180


class World:
    """`size` processes that run a function together, each with the communicator of the ranks that take part."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mgtp-world-")
        size, context = self.size, mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, str(Path(self._folder.name) / "rendezvous"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, tp_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """job(communicator, *args) on ranks 0..tp_size-1; their results in rank order. Raises what a rank raised.

        After a failure the others may be stuck in a collective: the next job gets a new world.
        """
        try:
            return self._run(tp_size, job, args)
        except BaseException:
            self.close()
            self._start()
            raise

    def _run(self, tp_size: int, job: Callable[..., Any], args: tuple) -> list[Any]:
        for pipe in self._pipes[:tp_size]:
            pipe.send((tp_size, job, args))
        results: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(tp_size), strict=False))
        deadline = time.monotonic() + JOB_SECONDS
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish {job.__name__} in {JOB_SECONDS} s")
            for pipe in (p for p in self._pipes if p in ready):
                rank = waiting.pop(pipe)
                failed, value = pipe.recv()
                if failed:
                    raise AssertionError(f"rank {rank} of {tp_size}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(tp_size)]

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    """A rank of the world: join once, then run jobs until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from mgtp.runtime.communicator import HostCommunicator, SingleRank

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) for n in range(2, size + 1)}
    while True:
        try:
            tp_size, job, args = pipe.recv()
        except EOFError:
            return
        communicator = SingleRank() if tp_size == 1 else HostCommunicator(groups[tp_size])  # type: ignore[arg-type]
        try:
            pipe.send((False, job(communicator, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
