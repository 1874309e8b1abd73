"""What a rank finds out about itself for the front: the memory it holds, what its device can do, what collectives take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import memory
from .ceiling import copy_bandwidth, product_rate
from .collectives import step_costs
from .messages import (
    AskMemory,
    CeilingReport,
    CollectiveReport,
    Measure,
    MeasureCeiling,
    MeasureMemory,
    MemoryReport,
    RankMessage,
)

if TYPE_CHECKING:
    from .rank_worker import RankWorker


def answer(worker: RankWorker, message: Measure) -> None:
    """Tell the front what it asks for."""
    worker.link.send(_found(worker, message))


def _found(worker: RankWorker, message: Measure) -> RankMessage:
    if isinstance(message, AskMemory):
        return memory.report(worker.rank, worker.loaded_bytes, worker.place.device)
    if isinstance(message, MeasureMemory):
        return _memory(worker)
    if isinstance(message, MeasureCeiling):
        return _ceiling(worker)
    return _collectives(worker, message.batch)


def _memory(worker: RankWorker) -> MemoryReport:
    """What this rank holds after a forward pass over resident weights."""
    if worker.place.device.type == "cpu":
        memory.touch(worker.block)
    worker.warm_up()
    now, mapped, cache = memory.take_snapshot(worker.place.device), worker.mapped_bytes, worker.runner.cache
    return MemoryReport(
        rank=worker.rank,
        weight_bytes=worker.load_growth + mapped,
        device_used_bytes=worker.memory_in_use() - worker.before_load + mapped,
        device_free_bytes=now.free,
        device_total_bytes=now.total,
        kv_cache_tokens=worker.kv_cache_tokens,
        kv_cache_bytes=cache.num_bytes if cache is not None else 0,
    )


def _ceiling(worker: RankWorker) -> CeilingReport:
    """What this rank's device can do at best."""
    device = worker.place.device
    report = CeilingReport(worker.rank, copy_bandwidth(device), product_rate(device, worker.runner.dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return report


def _collectives(worker: RankWorker, batch: int) -> CollectiveReport:
    """Which collectives a decode step of `batch` sequences has, and how long each takes here."""
    communicator, device = worker.place.communicator, worker.place.device
    with step_costs.noted(communicator) as calls:
        worker.runner.forward(worker.scratch_step(batch))
        communicator.broadcast(torch.zeros(batch, dtype=torch.int64, device=device))  # of the sampled ids
    with torch.inference_mode():
        return CollectiveReport(worker.rank, step_costs.costs(calls, communicator, device))
