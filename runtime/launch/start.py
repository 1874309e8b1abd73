"""From a shard set and options to ranks that are loaded and warm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...shardplan.dtypes import itemsize
from ...shardplan.errors import RankError, UsageError
from ...shardplan.shard_set import ShardSet
from ..cache_layout import DEFAULT_BLOCK_SIZE
from ..capacity import CacheDemand, plan_blocks
from ..messages import RankMessage, Ready, Stage
from ..options import RankOptions
from . import group as group_module
from .devices import describe, place_ranks
from .group import RankGroup

log = logging.getLogger("mgtp.launch")

BLOCK_SIZES = tuple(1 << n for n in range(9))


@dataclass(frozen=True)
class LaunchOptions:
    """What the user says about where and how large to run."""

    device: str = "auto"
    devices: tuple[int, ...] | None = None
    allow_shared_device: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE
    max_batch_tokens: int = 2048
    enforce_eager: bool = False
    dummy_weights: bool = False
    kv_cache_bytes: int | None = None
    start_timeout: float = 600.0
    log_level: str = "info"


@dataclass
class StartedGroup:
    """A running group and what its ranks said when they were ready, in rank order."""

    group: RankGroup
    ready: list[Ready]
    seconds: float


def start_ranks(
    shard_set: ShardSet, options: LaunchOptions, on_stage: Callable[[int, str], None] | None = None
) -> StartedGroup:
    """Start the ranks of `shard_set` and wait until all are ready.

    Everything that can be refused is refused before a process is started. Raises UsageError, DeviceError or RankError.
    """
    group = spawn_ranks(shard_set, options)
    start = StartUp(group, options.start_timeout, on_stage)
    try:
        while not start.done:
            start.note(group.receive(start.seconds_left))
    except BaseException:
        group.stop()
        raise
    return start.result()


def spawn_ranks(shard_set: ShardSet, options: LaunchOptions) -> RankGroup:
    """Start a process for every rank, on the device it is given; raises UsageError or DeviceError before that."""
    check_sizes(shard_set, options)
    tp_size = shard_set.plan.tp_size
    devices = None if options.devices is None else list(options.devices)
    placement = place_ranks(tp_size, options.device, devices, options.allow_shared_device)
    log.info(describe(placement, options.device))
    rank_options = RankOptions(
        shard_set=str(shard_set.path.resolve()),
        tp_size=tp_size,
        device=placement.device,
        devices=list(placement.indices),
        allow_shared_device=options.allow_shared_device,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        max_batch_tokens=options.max_batch_tokens,
        enforce_eager=options.enforce_eager,
        dummy_weights=options.dummy_weights,
        kv_cache_bytes=options.kv_cache_bytes,
        start_timeout=options.start_timeout,
        log_level=options.log_level,
    )
    return RankGroup(rank_options, group_module.RANK_MODULE)


def check_sizes(shard_set: ShardSet, options: LaunchOptions) -> None:
    """Raise UsageError or DeviceError for a context or a cache that cannot be, saying what could."""
    model, plan, length = shard_set.model, shard_set.plan, options.max_model_len
    if length is not None and length > model.max_position:
        raise UsageError(
            f"--max-model-len {length} is longer than the model's own {model.max_position} tokens",
            f"use --max-model-len {model.max_position} or less, or leave it out",
        )
    if options.block_size not in BLOCK_SIZES:
        raise UsageError(
            f"--block-size {options.block_size} must be a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}",
            f"leave it out for {DEFAULT_BLOCK_SIZE}",
        )
    if options.kv_cache_bytes is None:
        return
    demand = CacheDemand(
        options.max_num_seqs,
        length or min(options.block_size, model.max_position),
        options.max_batch_tokens,
        options.block_size,
    )
    for rank in range(plan.tp_size):
        plan_blocks(model, plan.shared_axes(), rank, demand, options.kv_cache_bytes, itemsize(plan.dtype))


class StartUp:
    """How far the ranks of a group are on their way to being ready."""

    def __init__(self, group: RankGroup, timeout: float, on_stage: Callable[[int, str], None] | None = None) -> None:
        self.group, self.timeout, self.on_stage = group, timeout, on_stage
        self._begin = time.monotonic()
        self._ready: dict[int, Ready] = {}

    @property
    def done(self) -> bool:
        """Whether every rank is ready."""
        return len(self._ready) == len(self.group.ranks)

    @property
    def seconds_left(self) -> float:
        """Of the time that all ranks together may take."""
        return max(0.0, self._begin + self.timeout - time.monotonic())

    def note(self, message: RankMessage | None) -> None:
        """Take a message into account; None says that time ran out, which raises RankError."""
        if message is None:
            late = next(e for e in self.group.ranks if e.rank not in self._ready)
            raise RankError(
                f"rank {late.rank} is not ready after {self.timeout:g} s, stage {late.stage!r}",
                "see --debug for what it prints",
            )
        if isinstance(message, Ready):
            self._ready[message.rank] = message
            self.group.ranks[message.rank].stage = "running"
        elif isinstance(message, Stage):
            self.group.ranks[message.rank].stage = message.name
            if self.on_stage is not None:
                self.on_stage(message.rank, message.name)

    def result(self) -> StartedGroup:
        """The group with what its ranks said, in rank order."""
        ready = [self._ready[r] for r in sorted(self._ready)]
        return StartedGroup(self.group, ready, time.monotonic() - self._begin)
