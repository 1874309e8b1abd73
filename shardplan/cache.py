"""Shard sets that commands make by themselves when they are given a checkpoint: made once, found again.

The cache folder is MGTP_CACHE, else $XDG_CACHE_HOME/mgtp, else ~/.cache/mgtp. An entry is a folder `<name>` with the shard
set, beside a file `<name>.json` that says where it came from and when it was last used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import CheckpointError, MgtpError
from .in_use import alone, hold
from .output_folder import FolderBusy, locked
from .plan import FORMAT_VERSION, PLAN_FILE, ShardPlan
from .planner import make_plan
from .shard_set import ShardSet
from .sources.base import Source
from .writer import write_shards

LOCK_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Entry:
    """A cached shard set. `used` is seconds since the epoch; `tp_size` and `dtype` are absent when it is unfinished."""

    path: Path
    source: str
    used: float
    bytes: int
    tp_size: int | None
    dtype: str | None


def cache_folder() -> Path:
    """Where cached shard sets live."""
    given = os.environ.get("MGTP_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mgtp"


def cached_set(
    source: Source,
    tp_size: int,
    dtype: str = "auto",
    *,
    on_write: Callable[[Path, ShardPlan], None] = lambda path, plan: None,
    progress: Callable[[int, int], None] | None = None,
) -> ShardSet:
    """The shard set of `source` for `tp_size` ranks: found, or written now (`on_write` is told before).

    It is held in use for as long as what is returned. Two runs that want the same set do not write it twice: the later
    one waits. Raises what planning and writing raise.
    """
    plan = make_plan(source, tp_size, dtype)
    path = cache_folder() / _entry_name(source, plan)
    _make(path.parent)
    while True:
        held = hold(path)
        if held is not None and (path / PLAN_FILE).exists():
            try:
                shard_set = ShardSet.open(path, tp_size=tp_size)
            except CheckpointError as error:
                raise CheckpointError(f"cached {error.message}", f"remove it: rm -r {path}") from None
            _note_use(path, source.label)
            return replace(shard_set, in_use=held)
        on_write(path, plan)
        _note_use(path, source.label)
        try:
            write_shards(source, plan, path, progress=progress)
        except FolderBusy:
            time.sleep(LOCK_POLL_SECONDS)
        except MgtpError as error:
            raise _of_cache(error, path) from error


def entries() -> list[Entry]:
    """All cached shard sets, the longest unused first."""
    folder = cache_folder()
    if not folder.is_dir():
        return []
    return sorted((_entry(p) for p in folder.iterdir() if p.is_dir()), key=lambda entry: entry.used)


def prune(*, max_bytes: int | None = None, unused_seconds: float | None = None) -> tuple[list[Entry], list[Entry]]:
    """Remove sets unused for longer than `unused_seconds`, then the longest unused until `max_bytes` are left.

    Sets that are in use or being written are left alone. Returns what was removed, and what was to be but was not.
    """
    removed: list[Entry] = []
    skipped: list[Entry] = []
    found = entries()
    left = sum(entry.bytes for entry in found)
    for entry in found:
        too_old = unused_seconds is not None and time.time() - entry.used > unused_seconds
        too_much = max_bytes is not None and left > max_bytes
        if not (too_old or too_much):
            continue
        with alone(entry.path) as unused:
            if unused and not _is_written(entry.path):
                _remove(entry)
                removed.append(entry)
                left -= entry.bytes
            else:
                skipped.append(entry)
    return removed, skipped


def _entry_name(source: Source, plan: ShardPlan) -> str:
    """`<model>-tp<N>-<dtype>-<key>`: the key is of the content where it is known, else of the files' identity."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source.label).name or "model")[:60]
    text = json.dumps(
        [source.fingerprint or source.identity(), plan.shares, plan.dtype, plan.tool.version, FORMAT_VERSION]
    )
    return f"{label}-tp{plan.tp_size}-{plan.dtype}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "MGTP_CACHE" if os.environ.get("MGTP_CACHE") else "the cache folder"
        raise MgtpError(
            f"{what} {folder} cannot be made: {error.strerror}", "set MGTP_CACHE to a folder that you can write to"
        ) from None


def _of_cache(error: MgtpError, path: Path) -> MgtpError:
    """What is said of a folder that somebody has named, said of one that nobody has."""
    hint = error.hint.replace("name a folder", "set MGTP_CACHE to a folder")
    return type(error)(error.message.replace(f"--out {path}", f"cached set {path}"), hint)


def _note_use(path: Path, label: str) -> None:
    """Remember source and time of use; a read-only cache is fine."""
    try:
        path.with_name(path.name + ".json").write_text(json.dumps({"source": label, "used": time.time()}))
    except OSError:
        pass


def _entry(path: Path) -> Entry:
    try:
        note = json.loads(path.with_name(path.name + ".json").read_text())
        source, used = str(note["source"]), float(note["used"])
    except (OSError, ValueError, KeyError, TypeError):
        source, used = "?", path.stat().st_mtime
    size = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
    try:
        plan = ShardSet.open(path).plan
    except MgtpError:
        return Entry(path, source, used, size, None, None)
    return Entry(path, source, used, size, plan.tp_size, plan.dtype)


def _remove(entry: Entry) -> None:
    """plan.json goes first: what is left of an interrupted removal is no shard set."""
    try:
        (entry.path / PLAN_FILE).unlink(missing_ok=True)
        shutil.rmtree(entry.path)
        entry.path.with_name(entry.path.name + ".json").unlink(missing_ok=True)
    except OSError as error:
        raise MgtpError(f"{entry.path}: {error.strerror}", "check the permissions of the cache") from None


def _is_written(path: Path) -> bool:
    """Whether another process writes this set at the moment."""
    if not path.is_dir():
        return False
    try:
        with locked(path):
            return False
    except FolderBusy:
        return True
