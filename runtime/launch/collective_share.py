"""What part of a decode step the collectives take: asked of running ranks."""

from __future__ import annotations

import msgspec

from ...shardplan.errors import RankError
from ..messages import CollectiveCost, CollectiveReport, MeasureCollectives
from .start import StartedGroup

TIMEOUT_SECONDS = 120.0


class CollectiveShare(msgspec.Struct):
    """Collectives of a decode step of `batch` sequences over `backend`: how many are launched, and what they take.

    `ms`: each timed on its own, on the slowest rank, added up; `share`: of the measured step, None where too few were
    measured. `operations`: how many of each.
    """

    backend: str
    batch: int
    launches: int
    ms: float
    share: float | None
    operations: dict[str, int]


def measure_share(started: StartedGroup, batch: int, step_ms: float | None) -> CollectiveShare:
    """Have the ranks time the collectives of a step that takes `step_ms`. Raises RankError when one does not answer."""
    started.group.send(MeasureCollectives(batch))
    reports: dict[int, CollectiveReport] = {}
    while len(reports) < len(started.ready):
        message = started.group.receive(TIMEOUT_SECONDS)
        if message is None:
            late = next(r for r in range(len(started.ready)) if r not in reports)
            raise RankError(f"rank {late} did not time its collectives", "run again with --debug")
        if isinstance(message, CollectiveReport):
            reports[message.rank] = message
    backend = next(axis.backend for axis in started.ready[0].axes if axis.axis == "tp")
    return share(backend, batch, step_ms, [reports[rank].costs for rank in sorted(reports)])


def share(backend: str, batch: int, step_ms: float | None, costs: list[list[CollectiveCost]]) -> CollectiveShare:
    """Put together what every rank measured: `costs` of each, the same calls in the same order."""
    operations: dict[str, int] = {}
    for cost in costs[0]:
        operations[cost.operation] = operations.get(cost.operation, 0) + cost.count
    ms = 1e3 * sum(max(c.seconds for c in same) * same[0].count for same in zip(*costs, strict=True))
    part = None if step_ms is None else ms / step_ms
    return CollectiveShare(backend, batch, sum(operations.values()), ms, part, operations)
