"""Whether a shard set still holds what was written, and whether that is what a checkpoint has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import CheckpointError
from .hashing import hash_file_range
from .names import canonical_name
from .plan import RankPlan, TensorPlan
from .planner import match
from .shard_set import PlanFolder, ShardSet
from .slicing import as_bytes, convert, part_of_window, source_bytes, windows
from .sources.base import Source, TensorInfo
from .sources.small_files import CONFIG_FILE
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


def verify_folder(folder: PlanFolder, rank: int | None = None, progress: ProgressCallback | None = None) -> list[Fault]:
    """Check every file of a plan, small ones too; with a `rank` its file alone, and what is there of the small ones.

    Raises CheckpointError when the plan is not for the model that its config.json describes.
    """
    faults = [Fault(name, "", "no such file") for name in folder.missing(folder.plan.files) if rank is None]
    for name in folder.plan.files.keys() - folder.missing(folder.plan.files):
        faults += _fault_of(folder.read_file, name, name)
    faults += [Fault(name, "", "not part of the shard set") for name in folder.foreign_files()]
    ranks = range(folder.plan.tp_size) if rank is None else [rank]
    if not any(fault.file == CONFIG_FILE for fault in faults) and not folder.missing([CONFIG_FILE]):
        folder.read_model(folder.read_file(CONFIG_FILE), ranks)
    return sorted(faults, key=lambda f: f.file) + verify_set(folder, progress, ranks=ranks)


def verify_set(
    folder: PlanFolder,
    progress: ProgressCallback | None = None,
    threads: int | None = None,
    ranks: Iterable[int] | None = None,
) -> list[Fault]:
    """Hash every tensor of every rank, or of `ranks`, again; a fault for each that is not what the plan says.

    A file that is missing, or has another size or header, is one fault.
    """
    faults: list[Fault] = []
    sound: list[RankPlan] = []
    for rank in folder.plan.ranks if ranks is None else [folder.plan.ranks[r] for r in ranks]:
        found = _fault_of(folder.check_rank_file, rank, rank.file)
        faults += found
        sound += [] if found else [rank]
    tensors = [(rank, tensor) for rank in sound for tensor in rank.tensors]
    total, done = sum(tensor.bytes for _, tensor in tensors), 0
    with _descriptors(folder, sound) as fds, _pool(threads) as pool:
        checks = pool.map(lambda pair: _check_tensor(fds[pair[0].rank], *pair), tensors)
        for (_, tensor), fault in zip(tensors, checks, strict=True):
            if fault is not None:
                faults.append(fault)
            done += tensor.bytes
            if progress is not None:
                progress(done, total)
    return faults


def _fault_of(check: Callable[[Any], object], what: Any, file: str) -> list[Fault]:
    """What a check of `file` finds wrong, if anything."""
    try:
        check(what)
    except CheckpointError as error:
        return [Fault(file, "", error.message.partition(f"{file}: ")[2] or error.message)]
    return []


def _check_tensor(fd: int, rank: RankPlan, tensor: TensorPlan) -> Fault | None:
    try:
        found = hash_file_range(fd, rank.data_offset + tensor.offset, tensor.bytes)
    except (OSError, ValueError, OverflowError) as error:  # a plan that was not held against a model may say anything
        return Fault(rank.file, tensor.name, f"cannot be read: {getattr(error, 'strerror', error)}")
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
        Fault(name, "", "not the checkpoint's")
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
        Fault(rank.file, info.name, "not the checkpoint's values")
        for rank, equal in zip(ranks, is_equal, strict=True)
        if not equal
    ]


@contextmanager
def _descriptors(folder: PlanFolder, ranks: list[RankPlan]) -> Iterator[dict[int, int]]:
    """The files of `ranks`, open for reading: rank -> descriptor."""
    with ExitStack() as stack:
        fds: dict[int, int] = {}
        for rank in ranks:
            try:
                file = stack.enter_context(folder.rank_path(rank.rank).open("rb"))
            except OSError as error:
                raise CheckpointError(f"{folder.path / rank.file}: {error.strerror}", "copy the file again") from None
            fds[rank.rank] = file.fileno()
        yield fds


def _pool(threads: int | None) -> WorkerPool:
    return WorkerPool(threads or min(_MAX_THREADS, usable_cores()))
