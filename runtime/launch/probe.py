"""Asking running ranks what they hold, and comparing it with the plan."""

from __future__ import annotations

import sys

import msgspec

from ...shardplan.errors import MgtpError, RankError
from ...shardplan.plan import ShardPlan
from ..messages import MeasureMemory, MemoryReport
from .start import StartedGroup

TOLERANCE = 0.05
"""Part of the planned weight bytes by which a rank may be off."""

NOISE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Memory that loading takes whatever the model's size: the allocator's arenas or pages (of 20 MiB on a GPU), the
driver's modules and streams. So much a rank may be off in any case."""

TIMEOUT_SECONDS = 120.0


class RankMemory(msgspec.Struct):
    """One rank: what its plan says, and what it holds, in bytes. `share` is its part of all measured weights.

    It may be off its plan by `allowance_bytes`.
    """

    rank: int
    device: str
    file: str
    file_bytes: int
    planned_weight_bytes: int
    weight_bytes: int
    share: float
    within_plan: bool
    allowance_bytes: int
    device_used_bytes: int
    device_free_bytes: int
    device_total_bytes: int
    kv_cache_tokens: int
    kv_cache_bytes: int


class MemoryProbe(msgspec.Struct):
    """All ranks; `within_plan` when each of them is."""

    tp_size: int
    cp_size: int
    total_weight_bytes: int
    within_plan: bool
    ranks: list[RankMemory]


def probe(started: StartedGroup, plan: ShardPlan) -> MemoryProbe:
    """Measure every rank after a forward pass. Raises RankError when one does not answer."""
    if started.ready[0].device == "cpu" and sys.platform != "linux":
        raise MgtpError("memory of CPU ranks is measured through /proc, which this system lacks", "run it on Linux")
    started.group.send(MeasureMemory())
    reports: dict[int, MemoryReport] = {}
    while len(reports) < len(started.ready):
        message = started.group.receive(TIMEOUT_SECONDS)
        if message is None:
            late = next(r.rank for r in started.ready if r.rank not in reports)
            raise RankError(
                f"rank {late} did not report its memory within {TIMEOUT_SECONDS:g} s", "run again with --debug"
            )
        if isinstance(message, MemoryReport):
            reports[message.rank] = message
    total = sum(r.weight_bytes for r in reports.values())
    ranks = [_compare(plan, reports[ready.rank], ready.device, total) for ready in started.ready]
    return MemoryProbe(plan.tp_size, len(ranks) // plan.tp_size, total, all(r.within_plan for r in ranks), ranks)


def _compare(plan: ShardPlan, report: MemoryReport, device: str, total: int) -> RankMemory:
    planned = plan.ranks[report.rank % plan.tp_size]
    # The whole data section is brought over, padding included; pages round it up.
    expected = planned.bytes - planned.data_offset
    allowance = max(int(TOLERANCE * expected), NOISE_BYTES[device.split(":")[0]])
    return RankMemory(
        rank=report.rank,
        device=device,
        file=planned.file,
        file_bytes=planned.bytes,
        planned_weight_bytes=expected,
        weight_bytes=report.weight_bytes,
        share=report.weight_bytes / max(1, total),
        within_plan=abs(report.weight_bytes - expected) <= allowance,
        allowance_bytes=allowance,
        device_used_bytes=report.device_used_bytes,
        device_free_bytes=report.device_free_bytes,
        device_total_bytes=report.device_total_bytes,
        kv_cache_tokens=report.kv_cache_tokens,
        kv_cache_bytes=report.kv_cache_bytes,
    )
