"""The decode step as CUDA graphs: one recording a batch size, replayed with new inputs in the same places."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from ..shardplan.rope import Rope
from .layers.rotary import RotaryTables
from .messages import Step
from .sampling import Sampled

log = logging.getLogger("mgtp.runtime")

Outcome = tuple[torch.Tensor, Sampled]
"""Logits [S, V] and the likeliest tokens."""

Decode = Callable[[torch.Tensor, torch.Tensor, dict[Rope, torch.Tensor]], Outcome]
"""(positions, rows, angles of length-dependent ropes) -> the step's outcome; the first two int32 [S]"""


def bucket_sizes(most: int) -> list[int]:
    """Batch sizes worth a graph: a step is padded to the next one, by a third at the very most from 4 on."""
    sizes = [1, 2, 4, 8, 12, *range(16, 128, 16), *range(128, 512, 32), *range(512, most + 64, 64)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """Graphs of `decode` for up to len(last_ids) - 1 sequences. Rows that pad a batch use the last row, which nobody owns.

    Frequencies that depend on a sequence's length are worked out before a replay: that takes host data.
    """

    def __init__(self, decode: Decode, last_ids: torch.Tensor, varying: Sequence[Rope], rotary: RotaryTables) -> None:
        self.decode, self.rotary = decode, rotary
        self.padding_row = len(last_ids) - 1
        self.sizes = bucket_sizes(self.padding_row)
        most, device = self.sizes[-1], last_ids.device
        # Of every bucket [3, size]: position, row, and the length that frequencies go by.
        self._inputs = {size: torch.zeros((3, size), dtype=torch.int32, device=device) for size in self.sizes}
        self._angles = {rope: torch.zeros((most, rope.rotary_dim), device=device) for rope in varying}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Outcome]] = {}
        self._pool = None
        begin = time.monotonic()
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self._graphs[size] = self._record(size)
        torch.cuda.synchronize(device)
        log.info("%d decode graphs in %.1f s", len(self.sizes), time.monotonic() - begin)

    def replay(self, step: Step) -> Outcome:
        """The outcome of a decode step, valid until the next replay."""
        count = len(step.sequences)
        size = next(size for size in self.sizes if size >= count)
        self._fill(step, size)
        graph, outcome = self._graphs[size]
        graph.replay()
        return _first(outcome, count)

    def eager(self, step: Step) -> Outcome:
        """The same step, padded alike, by launching its kernels one by one: what a replay must equal bit for bit."""
        count = len(step.sequences)
        size = next(size for size in self.sizes if size >= count)
        self._fill(step, size)
        return _first(self._run(size), count)

    def close(self) -> None:
        """Give the graphs back. A NCCL communicator cannot be destroyed while one lives that has recorded it."""
        torch.cuda.synchronize()
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _fill(self, step: Step, size: int) -> None:
        """Put the step's numbers where the graph looks for them."""
        pad = size - len(step.sequences)
        numbers = [s.start for s in step.sequences] + [0] * pad
        numbers += [s.slot for s in step.sequences] + [self.padding_row] * pad
        numbers += [max(s.prompt_len, s.start + 1) for s in step.sequences] + [1] * pad
        inputs = self._inputs[size]
        pinned = torch.tensor(numbers, dtype=torch.int32, pin_memory=True)
        inputs.copy_(pinned.view(3, size), non_blocking=True)
        for rope, angles in self._angles.items():
            angles[:size] = self.rotary.joined_rows(rope, inputs[0], inputs[2])

    def _run(self, size: int) -> Outcome:
        positions, rows, _ = self._inputs[size]
        return self.decode(positions, rows, {rope: angles[:size] for rope, angles in self._angles.items()})

    def _record(self, size: int) -> tuple[torch.cuda.CUDAGraph, Outcome]:
        self._inputs[size][1] = self.padding_row
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(size)  # compiles kernels and lets libraries set up, neither of which can be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's own thread may ask about events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outcome = self._run(size)
        self._pool = graph.pool()
        return graph, outcome


def _first(outcome: Outcome, count: int) -> Outcome:
    """The outcome without the rows that pad the batch."""
    logits, sampled = outcome
    return logits[:count], Sampled(sampled.ids[:count], sampled.failed[:count])
