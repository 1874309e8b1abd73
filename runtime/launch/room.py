"""Where the ranks of another model go, and whether they fit there: arithmetic on what is free, nothing is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...shardplan.dtypes import itemsize
from ...shardplan.errors import DeviceError
from ...shardplan.fit import (
    BLOCK_TOKENS,
    CACHE_FRACTION,
    CONTEXT_BYTES,
    StepSize,
    cache_needs,
    collective_bytes,
    smallest_tp_size,
    workspace_bytes,
)
from ...shardplan.shard_set import ShardSet
from .device_memory import HOST, free_bytes
from .devices import place_ranks
from .start import LaunchOptions

HOST_CACHE_FRACTION = 0.5
"""Part of the host's free memory that caches may take: other programs live there too."""


@dataclass(frozen=True)
class RankNeeds:
    """Bytes that one rank needs of `place`, a GPU's index or HOST.

    `fixed`: weights, and on a GPU context and workspace. `least_cache` holds one sequence, `full_cache` all that may
    run at once at full length.
    """

    rank: int
    place: int
    fixed: int
    least_cache: int
    full_cache: int


def share_out(sets: Mapping[str, ShardSet], launch: LaunchOptions) -> list[LaunchOptions]:
    """Launch options for sets that are served together: each where there is least, all with an equal part of the memory.

    Raises UsageError, or DeviceError when there is too little.
    """
    launches: list[LaunchOptions] = []
    for shard_set in sets.values():
        taken = [index for each in launches for index in each.devices or ()]
        launches.append(launch_for(shard_set, launch, taken))
    if len(launches) == 1:
        check_memory(next(iter(sets.values())), launch)
        return launches
    needed = [needs(shard_set, each) for shard_set, each in zip(sets.values(), launches, strict=True)]
    everyone, free = [r for ranks in needed for r in ranks], free_bytes(launch.device)
    check_room(" and ".join(sets), everyone, free, "serve fewer models, or use more devices")
    if launch.kv_cache_bytes is not None:
        return launches
    sizes = [cache_bytes(ranks, everyone, free) for ranks in needed]
    return [replace(each, kv_cache_bytes=size) for each, size in zip(launches, sizes, strict=True)]


def launch_for(shard_set: ShardSet, launch: LaunchOptions, taken: Iterable[int]) -> LaunchOptions:
    """`launch` for one set: no longer a context than it has, on the GPUs that are least `taken` (of one node)."""
    if launch.cluster is not None:
        return launch
    if launch.max_model_len is not None:
        launch = replace(launch, max_model_len=min(launch.max_model_len, shard_set.model.max_position))
    return spread(shard_set.plan.tp_size, launch, taken)


def spread(tp_size: int, launch: LaunchOptions, taken: Iterable[int]) -> LaunchOptions:
    """`launch` with the GPUs on which the fewest ranks of other models are; `taken` has an index for each of those."""
    devices = None if launch.devices is None else list(launch.devices)
    placement = place_ranks(tp_size, launch.device, devices, launch.allow_shared_device, launch.cp_size)
    if placement.device == "cpu":
        return launch
    candidates = devices if devices is not None else [gpu.index for gpu in placement.detected]
    num_ranks = tp_size * launch.cp_size
    if len(candidates) < num_ranks:
        return replace(launch, devices=placement.indices)
    busy = Counter(taken)
    return replace(launch, devices=tuple(sorted(candidates, key=lambda index: busy[index])[:num_ranks]))


def needs(shard_set: ShardSet, launch: LaunchOptions) -> list[RankNeeds]:
    """What every rank needs where `spread` has put it."""
    plan, model = shard_set.plan, shard_set.model
    axes, size = plan.shared_axes(), itemsize(plan.dtype)
    length, least = launch.max_model_len or model.max_position, launch.max_model_len or BLOCK_TOKENS
    num_ranks = plan.tp_size * launch.cp_size
    step = StepSize(launch.max_batch_tokens, launch.max_num_seqs, launch.cp_size, length)
    found = []
    for rank in range(num_ranks):
        r, given = plan.ranks[rank % plan.tp_size], launch.kv_cache_bytes  # tp varies fastest
        cache = cache_needs(model, axes, r.rank, size, launch.cp_size)
        fixed = r.bytes - r.data_offset
        if launch.devices:
            fixed += CONTEXT_BYTES + collective_bytes(num_ranks) + workspace_bytes(model, axes, r.rank, size, step)
        caches = (cache.total(1, least), cache.total(launch.max_num_seqs, length)) if given is None else (given, given)
        found.append(RankNeeds(rank, launch.devices[rank] if launch.devices else HOST, fixed, *caches))
    return found


def check_memory(shard_set: ShardSet, launch: LaunchOptions) -> None:
    """Raise DeviceError when the devices have too little memory free for a set that is to be started alone.

    On the CPU files are mapped, whatever their size, but weights that are made up take memory.
    """
    launch = launch_for(shard_set, launch, ())
    if launch.cluster is not None or (not launch.devices and shard_set.has_weights):
        return
    free = free_bytes(launch.device)
    if not launch.devices:
        _check_made_up(shard_set, launch, free[HOST])
        return
    try:
        check_room(str(shard_set.path), needs(shard_set, launch), free, "")
    except DeviceError as error:
        least = min(free[index] for index in launch.devices)
        raise DeviceError(error.message, _way_out(shard_set, launch, least)) from None


def _check_made_up(shard_set: ShardSet, launch: LaunchOptions, free: int) -> None:
    weights = sum(rank.fixed for rank in needs(shard_set, launch))
    if weights > free:
        raise DeviceError(
            f"{shard_set.path}: random weights of {weights} bytes do not fit into the host's memory, {free} are free",
            "use a smaller model, or GPUs",
        )


def _way_out(shard_set: ShardSet, launch: LaunchOptions, least: int) -> str:
    """What to do where the smallest GPU has `least` bytes free, too little."""
    plan = shard_set.plan
    better = smallest_tp_size(shard_set.model, itemsize(plan.dtype), least, launch.max_model_len, launch.cp_size)
    if better is not None and better > plan.tp_size:
        return f"use --tp-size {better}"
    return "use GPUs with more memory, or end what else runs on them"


def check_room(label: str, ranks: Sequence[RankNeeds], free: Mapping[int, int], hint: str) -> None:
    """Raise DeviceError, naming a rank, unless all of them fit with the least cache."""
    for place, needed in _by_place(ranks, full=False).items():
        if needed > free[place]:
            rank = next(r.rank for r in ranks if r.place == place)
            where = "the host" if place == HOST else f"GPU {place}"
            raise DeviceError(f"{label}: rank {rank} needs {needed} bytes of {where}, {free[place]} are free", hint)


def has_full_room(ranks: Sequence[RankNeeds], free: Mapping[int, int]) -> bool:
    """Whether all of them fit with all the cache they can use."""
    return all(needed <= free[place] for place, needed in _by_place(ranks, full=True).items())


def _by_place(ranks: Sequence[RankNeeds], *, full: bool) -> Counter[int]:
    total: Counter[int] = Counter()
    for r in ranks:
        cache = r.full_cache if full else r.least_cache
        total[r.place] += r.fixed + int(cache / (HOST_CACHE_FRACTION if r.place == HOST else CACHE_FRACTION))
    return total


def cache_bytes(ranks: Sequence[RankNeeds], everyone: Sequence[RankNeeds], free: Mapping[int, int]) -> int:
    """The cache of each of `ranks` when `everyone` has yet to start: an equal part of what all the rest leaves."""
    parts = []
    for r in ranks:
        there = [other for other in everyone if other.place == r.place]
        fraction = HOST_CACHE_FRACTION if r.place == HOST else CACHE_FRACTION
        parts.append(int((free[r.place] - sum(other.fixed for other in there)) * fraction) // len(there))
    return min(parts)
