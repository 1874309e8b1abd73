"""Asking ranks without a model for their devices, links and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ...shardplan.errors import RankError
from ..collectives.crossover import CrossOver, cross_overs
from ..collectives.request import check_placement, parse_collective
from ..messages import CollectiveFigure, DeviceReport, LinkInfo, Stage
from ..options import RankOptions
from .device_memory import total_bytes
from .devices import place_ranks
from .group import RankGroup
from .start import LaunchOptions

PROBE_MODULE = "mgtp.runtime.probe_rank"
TIMEOUT_SECONDS = 300.0


class ProbedDevice(msgspec.Struct):
    """A rank's device and its memory in bytes."""

    rank: int
    device: str
    total_bytes: int


class Choice(msgspec.Struct):
    """What runs would use and why; `cross_overs`: from which message size on which backend measured fastest."""

    backend: str
    reason: str
    cross_overs: list[CrossOver]


class ProbeResult(msgspec.Struct):
    """Everything that was found. `faults`: of every backend that cannot be used, the reason."""

    torch_version: str
    nccl_version: str | None
    driver_version: str | None
    devices: list[ProbedDevice]
    links: list[LinkInfo]
    collectives: list[CollectiveFigure]
    choice: Choice
    faults: dict[str, str]


def num_ranks(tp_size: int | None, options: LaunchOptions) -> int:
    """Ranks to start: as many as asked for, else one a GPU, and one on the CPU."""
    if tp_size is not None:
        return tp_size
    return max(1, len(total_bytes(options.device) if options.devices is None else options.devices))


def probe_devices(
    tp_size: int, options: LaunchOptions, on_stage: Callable[[int, str], None] | None = None
) -> ProbeResult:
    """Start `tp_size` ranks and put together what they say. Raises UsageError, DeviceError, RankError."""
    devices = None if options.devices is None else list(options.devices)
    placement = place_ranks(tp_size, options.device, devices, options.allow_shared_device)
    check_placement(parse_collective(options.collective, ["tp"]), placement.device, placement.indices)
    rank_options = RankOptions(
        shard_set="",
        tp_size=tp_size,
        device=placement.device,
        devices=list(placement.indices),
        allow_shared_device=options.allow_shared_device,
        collective=options.collective,
        collective_timeout=TIMEOUT_SECONDS,
        log_level=options.log_level,
    )
    with RankGroup(rank_options, PROBE_MODULE) as group:
        return _put_together(_reports(group, tp_size, on_stage))


def _reports(group: RankGroup, count: int, on_stage: Callable[[int, str], None] | None) -> list[DeviceReport]:
    """What the ranks say, in rank order."""
    reports: dict[int, DeviceReport] = {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(reports) < count:
        message = group.receive(max(0.0, deadline - time.monotonic()))
        if message is None:
            late = next(e for e in group.ranks if e.rank not in reports)
            raise RankError(
                f"rank {late.rank} did not answer within {TIMEOUT_SECONDS:g} s, stage {late.stage!r}",
                "see --debug for what it prints",
            )
        if isinstance(message, DeviceReport):
            reports[message.rank] = message
        elif isinstance(message, Stage):
            group.ranks[message.rank].stage = message.name
            if on_stage is not None:
                on_stage(message.rank, message.name)
    return [reports[rank] for rank in sorted(reports)]


def _put_together(reports: list[DeviceReport]) -> ProbeResult:
    first = reports[0]
    links = {(link.source, link.target): link for report in reports for link in report.links}
    axis = first.axis
    return ProbeResult(
        torch_version=first.torch_version,
        nccl_version=first.nccl_version,
        driver_version=first.driver_version,
        devices=[ProbedDevice(r.rank, r.device, r.total_bytes) for r in reports],
        links=[links[key] for key in sorted(links)],
        collectives=first.collectives,
        choice=Choice(
            backend="none" if axis is None else axis.backend,
            reason="one rank exchanges nothing" if axis is None else axis.reason,
            cross_overs=cross_overs(first.collectives),
        ),
        faults=first.faults,
    )
