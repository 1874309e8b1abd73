"""From a shard set and options to ranks that are loaded and warm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...shardplan.dtypes import itemsize
from ...shardplan.errors import UsageError
from ...shardplan.fit import check_cp_size
from ...shardplan.shard_set import ShardSet
from ...shardplan.values import counted
from ..cache_layout import DEFAULT_BLOCK_SIZE
from ..capacity import CacheDemand, plan_blocks
from ..collectives.request import check_placement, parse_collective
from ..messages import Notice, RankMessage, Ready, Stage
from ..options import RankOptions
from ..stages import RUNNING, SPAWN, STEP_SECONDS, position, stage_limits
from . import group as group_module
from .cluster import Cluster
from .devices import Placement, describe, place_ranks
from .first_cause import stalled_error
from .group import RankGroup
from .node_messages import JOIN_SECONDS
from .patience import Patience

log = logging.getLogger("mgtp.launch")

MAX_NUM_SEQS = 65536
"""Every sequence that may run has a place in tables and states, whether it runs or not."""

BLOCK_SIZES = tuple(1 << n for n in range(9))

COLLECTIVE_MARGIN = 60.0
"""Seconds by which ranks wait longer in a collective than the front does for them: the front names the late one."""


@dataclass(frozen=True)
class LaunchOptions:
    """What the user says about where and how large to run. `step_timeout` None: what suits the device."""

    cp_size: int = 1
    device: str = "auto"
    devices: tuple[int, ...] | None = None
    allow_shared_device: bool = False
    collective: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE
    max_batch_tokens: int = 2048
    enforce_eager: bool = False
    kv_cache_bytes: int | None = None
    step_timeout: float | None = None
    log_level: str = "info"
    cluster: Cluster | None = None


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
    start = StartUp(group, start_limits(shard_set, options.cluster), on_stage)
    try:
        while not start.done:
            start.note(group.receive(start.patience))
    except BaseException:
        group.stop()
        raise
    return start.result()


def start_limits(shard_set: ShardSet, cluster: Cluster | None = None) -> dict[str, float]:
    """How long each stage may take for the ranks of `shard_set`, in seconds."""
    limits = stage_limits(max(rank.bytes for rank in shard_set.plan.ranks))
    return limits if cluster is None else {**limits, SPAWN: JOIN_SECONDS}


def place_local_ranks(shard_set: ShardSet, options: LaunchOptions) -> Placement:
    """A device for every rank of this node; raises UsageError or DeviceError when there are too few."""
    cluster, tp_size = options.cluster, shard_set.plan.tp_size
    if cluster is not None:  # some of the ranks
        tp_size = len(cluster.ranks_of(cluster.node, tp_size))
    devices = None if options.devices is None else list(options.devices)
    placement = place_ranks(tp_size, options.device, devices, options.allow_shared_device, options.cp_size)
    log.info(describe(placement, options.device))
    return placement


def spawn_ranks(shard_set: ShardSet, options: LaunchOptions) -> RankGroup:
    """Start a process for every rank, on the device it is given; raises UsageError or DeviceError before that."""
    check_sizes(shard_set, options)
    placement, cluster = place_local_ranks(shard_set, options), options.cluster
    step_timeout = options.step_timeout or STEP_SECONDS[placement.device]
    check_placement(parse_collective(options.collective, ["tp", "cp"]), placement.device, placement.indices)
    rank_options = RankOptions(
        shard_set=str(shard_set.path.resolve()),
        tp_size=shard_set.plan.tp_size,
        cp_size=options.cp_size,
        device=placement.device,
        devices=list(placement.indices),
        allow_shared_device=options.allow_shared_device,
        collective=options.collective,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        max_batch_tokens=options.max_batch_tokens,
        enforce_eager=options.enforce_eager,
        dummy_dtype="" if shard_set.has_weights else shard_set.plan.dtype,
        kv_cache_bytes=options.kv_cache_bytes,
        step_timeout=step_timeout,
        collective_timeout=max(step_timeout, *start_limits(shard_set, cluster).values()) + COLLECTIVE_MARGIN,
        log_level=options.log_level,
        fingerprint=shard_set.plan.fingerprint,
        steps=cluster.steps if cluster is not None else "",
        rendezvous=cluster.rendezvous if cluster is not None else "",
    )
    return RankGroup(rank_options, group_module.RANK_MODULE, cluster)


def check_sizes(shard_set: ShardSet, options: LaunchOptions) -> None:
    """Raise UsageError or DeviceError for a context or a cache that cannot be, saying what could."""
    model, plan, length = shard_set.model, shard_set.plan, options.max_model_len
    if length is not None and length > model.max_position:
        raise UsageError(
            f"--max-model-len {length} is longer than the model's own {counted(model.max_position, 'token')}",
            f"use --max-model-len {model.max_position} or less, or leave it out",
        )
    if options.max_num_seqs > MAX_NUM_SEQS:
        raise UsageError(
            f"--max-num-seqs {options.max_num_seqs} is more than {MAX_NUM_SEQS}", f"ask for {MAX_NUM_SEQS} or less"
        )
    if options.block_size not in BLOCK_SIZES:
        raise UsageError(
            f"--block-size {options.block_size} must be a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}",
            f"leave it out for {DEFAULT_BLOCK_SIZE}",
        )
    check_cp_size(options.cp_size, model.max_position, options.block_size)
    if options.kv_cache_bytes is None:
        return
    demand = CacheDemand(
        options.max_num_seqs,
        length or min(options.block_size, model.max_position),
        options.max_batch_tokens,
        options.block_size,
        options.cp_size,
    )
    for rank in range(plan.tp_size):
        plan_blocks(model, plan.shared_axes(), rank, demand, options.kv_cache_bytes, itemsize(plan.dtype))


class StartUp:
    """How far the ranks of a group are on their way to being ready.

    The group is in the stage of the rank that is furthest behind, on which the others wait, and it is that rank whose
    time runs: `limits` are seconds by stage.
    """

    def __init__(
        self, group: RankGroup, limits: dict[str, float], on_stage: Callable[[int, str], None] | None = None
    ) -> None:
        self.group, self.limits, self.on_stage = group, limits, on_stage
        self._begin = time.monotonic()
        self._ready: dict[int, Ready] = {}
        self.stage = SPAWN
        self.patience = Patience(limits[SPAWN])

    @property
    def done(self) -> bool:
        """Whether every rank is ready."""
        return len(self._ready) == len(self.group.ranks)

    def note(self, message: RankMessage | None) -> None:
        """Take a message into account; None says that time ran out, which raises RankError."""
        if message is None:
            late = [e for e in self.group.ranks if e.stage == self.stage]
            what = f"not ready after {self.limits[self.stage]:g} s"
            raise self.group.note(stalled_error(late, (f"is {what}", f"are {what}"), ""))
        if isinstance(message, Ready):
            self._ready[message.rank] = message
            self._enter(message.rank, RUNNING)
        elif isinstance(message, Notice):
            log.warning(message.text)
        elif isinstance(message, Stage):
            self._enter(message.rank, message.name)
            if self.on_stage is not None:
                self.on_stage(message.rank, message.name)

    def _enter(self, rank: int, stage: str) -> None:
        """A rank has come to a stage; when that takes the whole group on, time begins anew."""
        self.group.ranks[rank].stage = stage
        slowest = min((e.stage for e in self.group.ranks), key=position)
        if slowest != self.stage:
            self.stage = slowest
            self.patience = Patience(self.limits.get(slowest))

    def result(self) -> StartedGroup:
        """The group with what its ranks said, in rank order."""
        ready = [self._ready[r] for r in sorted(self._ready)]
        for axis in ready[0].axes:
            if axis.size > 1:
                log.info("collectives over %s, %d ranks: %s (%s)", axis.axis, axis.size, axis.backend, axis.reason)
        return StartedGroup(self.group, ready, time.monotonic() - self._begin)
