"""How long a collective takes: inside a graph where it can be recorded, as decode steps run it, otherwise call by call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ..communicator import Communicator

CALLS, REPEATS = 10, 5


def seconds_per_call(
    call: Callable[[], object], communicator: Communicator, device: torch.device, calls: int = CALLS
) -> float:
    """The median of several rounds of `calls` calls. All ranks must ask for the same at the same time."""
    if device.type != "cuda":
        return _rounds(call, calls, lambda: None)
    call()  # compiles, connects
    torch.cuda.synchronize(device)
    if not communicator.capturable:
        return _rounds(call, calls, lambda: torch.cuda.synchronize(device))
    graph = torch.cuda.CUDAGraph()
    # A stream of its own: torch's default one stays on the device on which a process recorded first.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    seconds = _rounds(graph.replay, 1, lambda: torch.cuda.synchronize(device)) / calls
    graph.reset()  # NCCL does not end before the graphs that it is recorded in
    return seconds


def _rounds(call: Callable[[], object], calls: int, wait: Callable[[], None]) -> float:
    """Seconds of one of `calls` calls in a row, the median round."""
    call()
    rounds = []
    for _ in range(REPEATS):
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        rounds.append((time.perf_counter() - begin) / calls)
    return statistics.median(rounds)
