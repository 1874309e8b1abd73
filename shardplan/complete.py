"""Whether a folder already holds what a run would write: the same command again has nothing to do.

The plan says it but for the content of a local checkpoint, whose values are hashed again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import CheckpointError, UsageError
from .hashing import fingerprint, hash_bytes, new_hash
from .journal import journal_key
from .output_folder import State, check_paths, inspect
from .plan import PLAN_FILE, FilePlan, ShardPlan, decode_plan, encode_plan
from .shard_set import ShardSet
from .slicing import as_bytes, source_bytes, windows
from .sources.base import Source
from .workers import WorkerPool, usable_cores

_MAX_THREADS = 8


def complete_plan(
    source: Source,
    plan: ShardPlan,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    threads: int | None = None,
) -> ShardPlan | None:
    """The plan, with all hashes, of the set in `out` when it is what `plan` would give; None when there is no set.

    Sizes, headers and small files are checked, the weights that were written are not. Raises UsageError, saying what
    differs, for a set that this run would have to replace.
    """
    check_paths(source.label, out)
    if inspect(out) is not State.SHARD_SET or journal_key(out) is not None:
        return None
    try:
        held = ShardSet.open(out).plan
    except CheckpointError as error:
        raise _other(out, error.message) from None
    if difference := _difference(source, plan, held):
        raise _other(out, difference)
    found = source.fingerprint or _hash_source(source, held, progress, threads)
    if found != held.fingerprint:
        raise _other(out, f"made of other weights ({held.fingerprint}, not {found})")
    return held


def _other(out: Path, difference: str) -> UsageError:
    return UsageError(
        f"--out {out} already holds a shard set: {difference}", "name another folder, or replace it with --force"
    )


def _difference(source: Source, plan: ShardPlan, held: ShardPlan) -> str:
    """What tells two plans apart, hashes of weights left out; '' when nothing does."""
    for what, ours, theirs in (
        ("tp size", plan.tp_size, held.tp_size),
        ("shares", plan.shares, held.shares),
        ("dtype", plan.dtype, held.dtype),
        ("version", plan.tool.version, held.tool.version),
    ):
        if ours != theirs:
            return f"{what} {theirs}, not {ours}"
    blank = decode_plan(encode_plan(held), Path(PLAN_FILE))
    blank.fingerprint = plan.fingerprint
    for rank in blank.ranks:
        rank.hash = ""
        for tensor in rank.tensors:
            tensor.hash = ""
    files = {name: FilePlan(len(content), hash_bytes(content)) for name, content in source.files.items()}
    if blank.files != files:
        changed = sorted(name for name in {*files, *blank.files} if files.get(name) != blank.files.get(name))
        return f"made with another {changed[0]}"
    blank.files = plan.files
    return "" if blank == plan else "made of another checkpoint"


def _hash_source(source: Source, plan: ShardPlan, progress: Callable[[int, int], None], threads: int | None) -> str:
    """The fingerprint of a checkpoint that does not know its own: all its values are read."""
    infos = [source.tensors[t.name] for t in plan.ranks[0].tensors if t.source is not None]
    total, done, hashes = sum(map(source_bytes, infos)), 0, []

    def hash_values(name: str) -> str:
        running = new_hash()
        for start, stop in windows(source.tensors[name]):
            running.update(as_bytes(source.rows(name, start, stop)))
        return running.hexdigest()

    with WorkerPool(threads or min(_MAX_THREADS, usable_cores())) as pool:
        for info, digest in zip(infos, pool.map(hash_values, [info.name for info in infos]), strict=True):
            hashes.append(digest)
            done += source_bytes(info)
            progress(done, total)
    return fingerprint(zip(infos, hashes, strict=True), source.config)
