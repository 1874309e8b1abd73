"""The folder that a shard set is written into: what may be overwritten, who may write, whether there is room.

A run leaves nothing but files of its own kind: plan.json, rank files, small files, their temporary names, a journal and
a lock. Only these are ever removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path

import msgspec

from .errors import MgtpError, UsageError
from .in_use import alone
from .journal import JOURNAL_FILE, Journal, journal_key
from .plan import PLAN_FILE
from .rank_file import PARTIAL
from .sources.small_files import SMALL_FILES
from .values import counted

LOCK_FILE = ".lock"

log = logging.getLogger("mgtp.shard")

_RANK_FILE = re.compile(r"rank-\d+-of-\d+\.safetensors")


class FolderBusy(UsageError):
    """Another process is writing this folder."""


class State(Enum):
    """What is in the folder now."""

    ABSENT = "absent"
    EMPTY = "empty"
    INTERRUPTED = "interrupted"
    SHARD_SET = "a shard set"
    OTHER = "other files"


def inspect(out: Path) -> State:
    """What a folder holds. Raises UsageError when `out` is not a folder or cannot be read."""
    try:
        names = set(os.listdir(out))
    except FileNotFoundError:
        if not os.path.islink(out):
            return State.ABSENT
        raise UsageError(f"--out {out}: the link's target does not exist", "remove the link") from None
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}", "name a folder that you can write to") from None
    foreign = [name for name in names if not is_ours(name)]
    if PLAN_FILE in names and (not foreign or _is_plan(out / PLAN_FILE)):
        return State.SHARD_SET
    if journal_key(out) is not None:
        return State.INTERRUPTED
    if names <= {LOCK_FILE, f"{JOURNAL_FILE}{PARTIAL}"}:
        return State.EMPTY
    return State.OTHER


def is_ours(name: str) -> bool:
    """Whether `name` is one that only a shard run gives, or a small file of a shard set."""
    name = name.removesuffix(PARTIAL)
    return name in (PLAN_FILE, JOURNAL_FILE, LOCK_FILE, *SMALL_FILES) or _RANK_FILE.fullmatch(name) is not None


def check_paths(label: str, out: Path) -> None:
    """Refuse an output folder that is the source, lies inside it, or holds it. `label` is what the user typed."""
    source = Path(os.path.expanduser(label))
    if not source.exists():
        return  # a model on the hub
    source, target = source.resolve(), out.resolve()
    hint = "name a folder beside the checkpoint"
    if target == source:
        raise UsageError(f"--out {out} is the checkpoint itself", hint)
    if source in target.parents:
        raise UsageError(f"--out {out} lies inside the checkpoint {label}", hint)
    if target in source.parents and inspect(out) is not State.OTHER:
        raise UsageError(f"--out {out} holds the checkpoint {label}", hint)


def check_claim(out: Path, key: str, *, force: bool) -> None:
    """Refuse to write where something is that this run must not replace. Changes nothing."""
    state = inspect(out)
    if state is State.OTHER:
        raise UsageError(f"--out {out} is not empty and not a shard set", "name a new folder, or empty this one")
    if state is State.SHARD_SET and not force and journal_key(out) != key:
        raise UsageError(f"--out {out} already holds a shard set", "name another folder, or replace it with --force")


def check_space(out: Path, needed: int) -> None:
    """Raise MgtpError when the file system lacks `needed` bytes, not counting what this run replaces or continues."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    info = os.statvfs(place)
    free = info.f_bavail * info.f_frsize + _held_bytes(out)
    if needed > free:
        raise MgtpError(
            f"--out {out}: no space left on device: {needed} bytes are needed, {free} are free",
            "free some space, or name a folder on another disk",
        )


@contextmanager
def claim(out: Path, key: str, needed: int, num_ranks: int, *, force: bool) -> Iterator[Journal]:
    """The folder for one run alone, with the run's journal: empty at first, or with what an earlier run finished.

    Everything is refused before the folder is made or changed. Lock and journal go when the block ends well; the
    journal stays when it does not, so that the same command can continue.
    """
    check_claim(out, key, force=force)
    check_space(out, needed)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        check_claim(out, key, force=force)
        if journal_key(out) not in (None, key):
            log.warning("%s holds what an interrupted run for another plan or source left: starting afresh", out)
        journal = _begin(out, key, num_ranks)
        try:
            yield journal
            # The journal is the last to go: before that, the same command still finds a run to finish.
            (out / LOCK_FILE).unlink()
            journal.remove()
        finally:
            journal.close()


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder's lock; raises UsageError naming the process that holds it. The lock dies with its holder."""
    path = out / LOCK_FILE
    fd = _lock(path)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        if _is_at(fd, path):
            path.unlink()
        os.close(fd)


def _begin(out: Path, key: str, num_ranks: int) -> Journal:
    """The journal to go on with. A new one replaces what is there, but for a set that runs: ranks may yet open it."""
    is_replaced = (out / PLAN_FILE).exists() and journal_key(out) != key
    with alone(out) if is_replaced else nullcontext(True) as unused:
        if not unused:
            raise UsageError(f"--out {out} is a shard set in use", "wait until nothing runs it, or name another folder")
        journal = Journal(out, key, num_ranks)
        try:
            if journal.records:
                log.info("continuing an interrupted run: %s done", counted(len(journal.records), "tensor"))
            else:
                clear(out)
        except BaseException:
            journal.close()
            raise
    return journal


def clear(out: Path) -> None:
    """Remove what earlier runs left but for lock and journal. plan.json goes first: a folder without is no shard set."""
    (out / PLAN_FILE).unlink(missing_ok=True)
    sync_folder(out)
    for name in os.listdir(out):
        if is_ours(name) and name not in (LOCK_FILE, JOURNAL_FILE):
            (out / name).unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise FolderBusy(
                f"--out {path.parent} is being written by process {holder or 'unknown'}",
                "wait until it has finished, or name another folder",
            ) from None
        except OSError as error:
            log.warning("%s: cannot be locked (%s): do not run two commands into this folder", path, error.strerror)
            return fd
        if _is_at(fd, path):
            return fd
        os.close(fd)  # the holder before us has removed the file: this was a lock on nothing


def _is_at(fd: int, path: Path) -> bool:
    """Whether `path` still names the file that is open as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _is_plan(path: Path) -> bool:
    """Whether a plan.json was written by mgtp, however old or damaged the rest is."""
    try:
        content = msgspec.json.decode(path.read_bytes())
        return content["tool"]["name"] == "mgtp"
    except (OSError, msgspec.DecodeError, RecursionError, TypeError, KeyError):
        return False


def _held_bytes(out: Path) -> int:
    """Bytes on disk of the files that a run into `out` would replace or continue."""
    try:
        return sum(e.stat().st_blocks * 512 for e in os.scandir(out) if is_ours(e.name) and e.is_file())
    except FileNotFoundError:
        return 0
