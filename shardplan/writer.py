"""Writing a shard set: atomic, resumable, in one pass over the checkpoint.

    1. claim the folder: nothing is made or changed before the plan, the paths and the free space are known to be fine
    2. see what an interrupted run has left, and cut its files back to what still has its hash
    3. one pass over the checkpoint fills all rank files, under temporary names      (pipeline.py)
    4. final header, size check, fsync; then all files get their names, plan.json last

Files depend on nothing but the checkpoint's content, the options and the version of mgtp: no times, no paths.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

from .errors import MgtpError, UsageError
from .hashing import fingerprint, hash_bytes
from .journal import Journal, journal_key, run_key
from .layout import header_bytes
from .output_folder import check_paths, claim, clear, sync_folder, write_file
from .pipeline import write_tensors
from .plan import PLAN_FILE, FilePlan, ShardPlan, decode_plan, encode_plan
from .rank_file import RankFile
from .slicing import ValuesError, source_bytes
from .sources.base import Source
from .sources.files import is_gguf
from .values import counted
from .workers import WorkerPool, usable_cores

ProgressCallback = Callable[[int, int], None]
"""Bytes of the checkpoint that are done, and all of them."""

log = logging.getLogger("mgtp.shard")

_FAULTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "name a folder that you can write to",
    errno.EACCES: "name a folder that you can write to",
    errno.EPERM: "name a folder that you can write to",
    errno.EIO: "check the disk",
}


def default_folder(model: str, tp_size: int) -> Path:
    """Where a model goes when nothing else was said: <name>-tp<N> in the current folder."""
    name = Path(os.path.expanduser(model)).resolve().name
    name = re.sub(r"-tp\d+$", "", name[: -len(".gguf")] if is_gguf(name) else name)
    return Path(f"{name or 'model'}-tp{tp_size}")


def write_shards(
    source: Source,
    plan: ShardPlan,
    out: Path,
    *,
    force: bool = False,
    progress: ProgressCallback | None = None,
    threads: int | None = None,
) -> ShardPlan:
    """Write the shard set that `plan` describes into `out` and return the plan with all hashes.

    An interrupted run of the same plan and source is continued; `force` replaces an existing shard set. `threads` do
    the work (default: one a core, at most 8). Raises UsageError for a folder that must not be written to,
    CheckpointError for weights that are not acceptable, MgtpError when writing fails: the latter can be continued.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is not positive", "use 1 or more")
    if not source.has_weights:
        raise UsageError(f"{source.label}: only its headers were fetched", "open the checkpoint with its weights")
    check_paths(source.label, out)
    plan = decode_plan(encode_plan(plan), out / PLAN_FILE)  # a copy: hashes are filled in below
    key = run_key(plan, source.identity())
    plan.files = {name: FilePlan(len(content), hash_bytes(content)) for name, content in sorted(source.files.items())}
    needed = sum(r.bytes for r in plan.ranks) + sum(f.bytes for f in plan.files.values())
    try:
        with claim(out, key, needed, plan.tp_size, force=force) as journal:
            log.info("sharding %s for %s in %s into %s", source.label, counted(plan.tp_size, "rank"), plan.dtype, out)
            try:
                _write(source, plan, out, journal, progress or (lambda done, total: None), threads)
            except ValuesError:
                clear(out)
                journal.remove()
                raise
    except ValuesError:
        _remove_if_empty(out)
        raise
    except OSError as error:
        raise _write_failure(error, out, begun=journal_key(out) == key) from error
    sync_folder(out)
    return plan


def _write(
    source: Source, plan: ShardPlan, out: Path, journal: Journal, progress: ProgressCallback, threads: int | None
) -> None:
    files = _open_files(source, plan, out, journal)
    try:
        sizes = [source_bytes(source.tensors[name]) for name in _names(plan)]
        kept, total = sum(sizes[: min(file.done for file in files)]), sum(sizes)
        progress(kept, total)
        write_tensors(source, files, journal, threads, lambda done: progress(kept + done, total))
        _finish(source, plan, out, files, journal)
    finally:
        for file in files:
            file.close()
    for name, content in source.files.items():
        write_file(out / name, content)
    sync_folder(out)
    write_file(out / PLAN_FILE, encode_plan(plan))


def _open_files(source: Source, plan: ShardPlan, out: Path, journal: Journal) -> list[RankFile]:
    """The rank files, each cut back to what an earlier run has left of it that still has its hash."""
    records = journal.records
    is_known = source.fingerprint is not None or len(records) == len(_names(plan))
    known = _fingerprint(source, plan, journal) if is_known else ""
    files = [RankFile(out, rank, header_bytes(rank, plan.tp_size, known)) for rank in plan.ranks]
    cancelled = Event()
    with WorkerPool(min(len(files), usable_cores())) as pool:
        try:
            list(pool.map(lambda f: f.recover([record.ranks[f.plan.rank] for record in records], cancelled), files))
        except BaseException:
            cancelled.set()  # Ctrl-C: the pool is left when its threads have noticed
            raise
    for file in files:
        file.open()
    return files


def _finish(source: Source, plan: ShardPlan, out: Path, files: Sequence[RankFile], journal: Journal) -> None:
    """Complete the plan, and give all rank files their final headers and names."""
    plan.fingerprint = _fingerprint(source, plan, journal)
    for file in files:
        file.set_hashes([record.ranks[file.plan.rank] for record in journal.records])
    with WorkerPool(min(len(files), usable_cores())) as pool:
        list(pool.map(lambda f: f.finish(header_bytes(f.plan, plan.tp_size, plan.fingerprint)), files))
    for file in files:
        file.rename()
    sync_folder(out)


def _fingerprint(source: Source, plan: ShardPlan, journal: Journal) -> str:
    """What the source says, or made from the journal of all tensors."""
    if source.fingerprint is not None:
        return source.fingerprint
    infos = (source.tensors[name] for name in _names(plan))
    return fingerprint(zip(infos, (record.source for record in journal.records), strict=True), source.config)


def _names(plan: ShardPlan) -> list[str]:
    """The checkpoint's names of all tensors, in file order."""
    return [t.name for t in plan.ranks[0].tensors if t.source is not None]


def _write_failure(error: OSError, out: Path, *, begun: bool) -> MgtpError:
    """One line for what the system says about the output folder; what has `begun` can be continued."""
    where = error.filename if isinstance(error.filename, str) else str(out)
    hint = _FAULTS.get(error.errno or 0, "check the disk")
    again = ", then run the same command: it continues where it stopped" if begun else ""
    return MgtpError(f"{where}: cannot be written: {(error.strerror or str(error)).lower()}", hint + again)


def _remove_if_empty(out: Path) -> None:
    try:
        out.rmdir()
    except OSError:
        pass
