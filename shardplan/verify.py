"""Whether a shard set still holds what was written, and whether that is what a checkpoint has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from .errors import CheckpointError
from .hashing import hash_file_range
from .names import canonical_name
from .plan import RankPlan, TensorPlan
from .planner import match
from .shard_set import ShardSet
from .slicing import as_bytes, convert, part_of_window, source_bytes, windows
from .sources.base import Source, TensorInfo
from .workers import WorkerPool, usable_cores

ProgressCallback = Callable[[int, int], None]

_MAX_THREADS = 16


@dataclass(frozen=True)
class Fault:
    """What is wrong with one tensor of one file, or with a whole file (`tensor` is then empty)."""

    file: str
    tensor: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor, self.reason) if part)


def verify_set(
    shard_set: ShardSet, progress: ProgressCallback | None = None, threads: int | None = None
) -> list[Fault]:
    """Hash every tensor of every rank again, several at a time; a fault for each that is not what the plan says.

    A file that is missing, or has another size or header, is one fault.
    """
    faults, ranks = _file_faults(shard_set)
    tensors = [(rank, tensor) for rank in ranks for tensor in rank.tensors]
    total, done = sum(tensor.bytes for _, tensor in tensors), 0
    with _descriptors(shard_set, ranks) as fds, _pool(threads) as pool:
        checks = pool.map(lambda pair: _check_tensor(fds[pair[0].rank], *pair), tensors)
        for (_, tensor), fault in zip(tensors, checks, strict=True):
            if fault is not None:
                faults.append(fault)
            done += tensor.bytes
            if progress is not None:
                progress(done, total)
    return faults


def _file_faults(shard_set: ShardSet) -> tuple[list[Fault], list[RankPlan]]:
    """A fault for each rank file that is not the plan's by size or header, and the ranks of the others."""
    faults: list[Fault] = []
    sound: list[RankPlan] = []
    for rank in shard_set.plan.ranks:
        try:
            shard_set.check_rank_file(rank)
            sound.append(rank)
        except CheckpointError as error:
            faults.append(Fault(rank.file, "", error.message.removeprefix(f"{shard_set.rank_path(rank.rank)}: ")))
    return faults, sound


def _check_tensor(fd: int, rank: RankPlan, tensor: TensorPlan) -> Fault | None:
    try:
        found = hash_file_range(fd, rank.data_offset + tensor.offset, tensor.bytes)
    except OSError as error:
        return Fault(rank.file, tensor.name, f"cannot be read: {error.strerror}")
    if found == tensor.hash:
        return None
    return Fault(rank.file, tensor.name, "the file ends before" if found is None else "does not have the plan's hash")


def verify_against(
    shard_set: ShardSet, source: Source, progress: ProgressCallback | None = None, threads: int | None = None
) -> list[Fault]:
    """Compare every slice of every rank with the checkpoint, bit for bit after the recorded dtype conversion.

    Raises CheckpointError when the checkpoint itself is not acceptable.
    """
    blueprint = match(source)
    faults = _compare_files(shard_set, source)
    held = [{canonical_name(t.name): t for t in rank.tensors if t.source is not None} for rank in shard_set.plan.ranks]
    first = shard_set.plan.ranks[0].file
    wanted = {spec.name: blueprint.sources[spec.name] for spec in blueprint.specs}
    faults += [Fault(first, t.name, "the checkpoint has no such tensor") for n, t in held[0].items() if n not in wanted]
    total, done = sum(source_bytes(info) for info in wanted.values()), 0
    with _descriptors(shard_set, shard_set.plan.ranks) as fds, _pool(threads) as pool:
        for name, info in wanted.items():
            slices = [tensors[name] for tensors in held if name in tensors]
            if len(slices) < len(held):
                faults.append(Fault(first, info.name, "is missing, the checkpoint has it"))
            elif slices[0].source is None or tuple(slices[0].source.shape) != info.shape:
                faults.append(Fault(first, info.name, f"the checkpoint's has shape {list(info.shape)}"))
            else:
                faults += _compare_tensor(shard_set, source, info, slices, fds, pool)
            done += source_bytes(info)
            if progress is not None:
                progress(done, total)
    return faults


def _compare_files(shard_set: ShardSet, source: Source) -> list[Fault]:
    """Config, tokenizer and template have to be the checkpoint's own."""
    ours, theirs = shard_set.model_files(), source.files
    return [
        Fault(name, "", "is not the checkpoint's")
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


def _compare_tensor(
    shard_set: ShardSet,
    source: Source,
    info: TensorInfo,
    slices: list[TensorPlan],
    fds: dict[int, int],
    pool: WorkerPool,
) -> list[Fault]:
    """Window by window, all ranks at once; at most one fault a rank."""
    ranks = shard_set.plan.ranks
    positions = [rank.data_offset + tensor.offset for rank, tensor in zip(ranks, slices, strict=True)]
    is_equal = [True] * len(ranks)

    def compare(r: int, start: int, values) -> None:
        cut = slices[r].source
        assert cut is not None
        for part in part_of_window(values, start, cut):
            wanted = as_bytes(convert(part, slices[r].dtype, info.name))
            held = np.frombuffer(os.pread(fds[r], len(wanted), positions[r]), np.uint8)
            is_equal[r] &= np.array_equal(held, wanted)
            positions[r] += len(wanted)

    for start, stop in windows(info):
        values = source.rows(info.name, start, stop)
        list(pool.map(lambda r: compare(r, start, values), range(len(ranks))))  # noqa: B023 - used up at once
    return [
        Fault(rank.file, info.name, "its values are not the checkpoint's")
        for rank, equal in zip(ranks, is_equal, strict=True)
        if not equal
    ]


@contextmanager
def _descriptors(shard_set: ShardSet, ranks: list[RankPlan]) -> Iterator[dict[int, int]]:
    """The files of `ranks`, open for reading: rank -> descriptor."""
    with ExitStack() as stack:
        fds: dict[int, int] = {}
        for rank in ranks:
            try:
                file = stack.enter_context(shard_set.rank_path(rank.rank).open("rb"))
            except OSError as error:
                raise CheckpointError(
                    f"{shard_set.path / rank.file}: {error.strerror}", "copy the file again"
                ) from None
            fds[rank.rank] = file.fileno()
        yield fds


def _pool(threads: int | None) -> WorkerPool:
    return WorkerPool(threads or min(_MAX_THREADS, usable_cores()))
