"""A long-lived world of rank processes for tests: torch is imported once, every test borrows the first N ranks.

world.run(3, job), world.run_mesh(2, 2, job)      ranks whose collectives are tests/pipe_communicator.py's, which are quick
world.run_group(3, job)                           ranks with a process group and the product's own collectives over gloo
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

JOB_SECONDS = 180
PRELOADED = ["torch", "mgtp.runtime.rank_worker"]


@dataclass(frozen=True)
class MeshRanks:
    """What a job on a mesh gets in a communicator's place: that of all ranks that take part, and one an axis."""

    all: Any
    tp: Any
    cp: Any

    @property
    def rank(self) -> int:
        """This process among all."""
        return self.all.rank

    @property
    def size(self) -> int:
        """All ranks."""
        return self.all.size


class World:
    """`size` processes that run a function together, each with the communicator of the ranks that take part.

    They are forked from one process that has imported torch, or, with `spawn`, import it each: ranks on GPUs do.
    """

    def __init__(self, size: int, *, spawn: bool = False) -> None:
        self.size = size
        self._context: Any = mp.get_context("spawn" if spawn else "forkserver")
        if not spawn:
            self._context.set_forkserver_preload(PRELOADED)
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mgtp-world-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self._has_group = False
        self._pipes: list[Connection] = []
        self._processes = []
        between: list[dict[int, Connection]] = [{} for _ in range(self.size)]
        for a, b in combinations(range(self.size), 2):
            between[a][b], between[b][a] = self._context.Pipe()
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            args = (rank, self.size, rendezvous, theirs, between[rank])
            process = self._context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()  # so that the end of a rank is the end of its pipes
            self._pipes.append(ours)
            self._processes.append(process)
        for pipes in between:
            for pipe in pipes.values():
                pipe.close()

    def run(self, tp_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """job(communicator, *args) on ranks 0..tp_size-1; their results in rank order. Raises what a rank raised.

        After a failure the others may be stuck in a collective: the next job gets a new world.
        """
        return self._run_or_restart((tp_size, 1), job, args)

    def run_mesh(self, tp_size: int, cp_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The same on tp_size * cp_size ranks: job(MeshRanks, *args)."""
        return self._run_or_restart((tp_size, cp_size), job, args)

    def run_group(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`, with the communicator that ranks on the CPU have: torch.distributed is initialised, for all ranks."""
        if not self._has_group:
            for pipe in self._pipes:
                pipe.send(None)
            self._has_group = True
        return self._run_or_restart(size, job, args)

    def _run_or_restart(self, sizes: int | tuple[int, int], job: Callable[..., Any], args: tuple) -> list[Any]:
        try:
            return self._run(sizes, job, args)
        except BaseException:
            self.close()
            self._start()
            raise

    def _run(self, sizes: int | tuple[int, int], job: Callable[..., Any], args: tuple) -> list[Any]:
        size = sizes if isinstance(sizes, int) else sizes[0] * sizes[1]
        for pipe in self._pipes[:size]:
            pipe.send((sizes, job, args))
        results: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(size), strict=False))
        deadline = time.monotonic() + JOB_SECONDS
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._say_where_ranks_are()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish {job.__name__} in {JOB_SECONDS} s")
            for pipe in (p for p in self._pipes if p in ready):
                rank = waiting.pop(pipe)
                failed, value = _outcome(pipe)
                if failed:
                    raise AssertionError(f"rank {rank} of {size}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(size)]

    def end(self, seconds: float) -> None:
        """Let every process end by itself, for tools that watch them to the end."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(seconds)

    def _say_where_ranks_are(self) -> None:
        """Let every process write its stacks to stderr."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _outcome(pipe: Connection) -> tuple[bool, Any]:
    """Whether a rank's job failed, and its result or how it failed."""
    try:
        return pipe.recv()
    except EOFError:
        return True, "its process has ended"


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection, peers: dict[int, Connection]) -> None:
    """A rank of the world: run jobs until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    import torch

    torch.set_num_threads(1)
    groups: dict[int, Any] = {}
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            groups = _join(rank, size, rendezvous)
            continue
        sizes, job, args = message
        try:
            given = groups[sizes] if isinstance(sizes, int) else _communicators(rank, peers, *sizes)
            pipe.send((False, job(given, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def _join(rank: int, size: int, rendezvous: str) -> dict[int, Any]:
    """Number of ranks -> the communicator of the first so many; nothing useful on the others."""
    import torch.distributed as dist

    from mgtp.runtime.communicator import HostCommunicator, SingleRank

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) for n in range(2, size + 1)}
    return {1: SingleRank()} | {n: HostCommunicator(g) for n, g in groups.items() if rank < n}  # type: ignore[arg-type]


def _communicators(rank: int, peers: dict[int, Connection], tp_size: int, cp_size: int) -> Any:
    """This rank's communicator or, with a cp axis, its MeshRanks."""
    from mgtp.runtime.communicator import SingleRank
    from mgtp.runtime.mesh_sizes import axis_groups
    from tests.pipe_communicator import PipeCommunicator

    def communicator(ranks: tuple[int, ...]) -> Any:
        return SingleRank() if len(ranks) == 1 else PipeCommunicator(ranks, rank, peers)

    everyone = communicator(tuple(range(tp_size * cp_size)))
    if cp_size == 1:
        return everyone
    axes = axis_groups({"tp": tp_size, "cp": cp_size}).values()
    return MeshRanks(everyone, *(communicator(next(r for r in axis if rank in r)) for axis in axes))
