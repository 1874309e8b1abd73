"""Timing GPU work: graphs of many launches over several sets of weights, so that nothing is measured out of the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPLAYS = 7


def seconds(run: Callable[[], object], repeats: int = REPLAYS) -> float:
    """Median seconds of `run` on the device, by events."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def seconds_in_graph(calls: list[Callable[[], object]], rounds: int = 1) -> float:
    """Median seconds of one of `calls`, all recorded one after another, `rounds` times over."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return seconds(graph.replay) / (rounds * len(calls))


def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second by a large copy on the device."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))
