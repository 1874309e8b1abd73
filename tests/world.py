"""A long-lived world of rank processes for tests: torch is imported once, every test borrows the first N ranks."""

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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

JOB_SECONDS = 180


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
    """`size` processes that run a function together, each with the communicator of the ranks that take part."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mgtp-world-")
        size, context = self.size, mp.get_context("spawn")
        self._groups: set[tuple[int, ...]] = set()
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
        return self._run_or_restart(tp_size, 1, job, args)

    def run_mesh(self, tp_size: int, cp_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The same on tp_size * cp_size ranks: job(MeshRanks, *args)."""
        from mgtp.runtime.mesh_sizes import axis_groups

        groups = {ranks for axis in axis_groups({"tp": tp_size, "cp": cp_size}).values() for ranks in axis}
        new = sorted(ranks for ranks in groups - self._groups if len(ranks) > 1)
        for pipe in self._pipes if new else ():
            pipe.send(new)  # all processes make a group, whoever is in it
        self._groups |= groups
        return self._run_or_restart(tp_size, cp_size, job, args)

    def _run_or_restart(self, tp_size: int, cp_size: int, job: Callable[..., Any], args: tuple) -> list[Any]:
        try:
            return self._run(tp_size, cp_size, job, args)
        except BaseException:
            self.close()
            self._start()
            raise

    def _run(self, tp_size: int, cp_size: int, job: Callable[..., Any], args: tuple) -> list[Any]:
        size = tp_size * cp_size
        for pipe in self._pipes[:size]:
            pipe.send((tp_size, cp_size, job, args))
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
                failed, value = pipe.recv()
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


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    """A rank of the world: join once, then run jobs until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    import torch
    import torch.distributed as dist

    from mgtp.runtime.communicator import HostCommunicator, SingleRank
    from mgtp.runtime.mesh_sizes import axis_groups

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    groups = {tuple(range(n)): dist.new_group(list(range(n))) for n in range(2, size + 1)}

    def communicator(ranks: tuple[int, ...]) -> Any:
        return SingleRank() if len(ranks) == 1 else HostCommunicator(groups[ranks])  # type: ignore[arg-type]

    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if isinstance(message, list):
            groups |= {ranks: dist.new_group(list(ranks)) for ranks in message if ranks not in groups}
            continue
        tp_size, cp_size, job, args = message
        given = communicator(tuple(range(tp_size * cp_size)))
        if cp_size > 1:
            axes = axis_groups({"tp": tp_size, "cp": cp_size}).values()
            given = MeshRanks(given, *(communicator(next(r for r in axis if rank in r)) for axis in axes))
        try:
            pipe.send((False, job(given, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
