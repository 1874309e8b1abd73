"""The private folder of a run: rendezvous file, Unix sockets, options. Gone when the run is over."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ...shardplan.errors import MgtpError

_PREFIX = "mgtp-"
_OWNER = "owner"


def create_run_folder() -> Path:
    """A new 0700 folder with a short path: a Unix socket's path holds 107 bytes."""
    remove_stale()
    base = _base()
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        try:
            (folder / _OWNER).write_text(_identity(os.getpid()))
        except BaseException:
            remove_run_folder(folder)
            raise
    except OSError as error:
        hint = "make room there, or let XDG_RUNTIME_DIR or TMPDIR name another folder"
        raise MgtpError(f"{base}: {error.strerror}", hint) from None
    return folder


def remove_run_folder(folder: Path) -> None:
    """Remove a run's folder; missing is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> None:
    """Remove folders of our own runs whose front is gone (it was killed with -9)."""
    for folder in _base().glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            owner = (folder / _OWNER).read_text()
        except OSError:
            continue  # another program's, or one that is being made
        pid = owner.split(" ")[0]
        if pid.isdecimal() and owner != _identity(int(pid)):
            remove_run_folder(folder)


def _base() -> Path:
    """The shortest usable place: XDG_RUNTIME_DIR is private and in memory, /tmp always exists."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) < 40 and os.access(runtime, os.W_OK):
        return Path(runtime)
    base = tempfile.gettempdir()
    return Path(base if len(base) < 70 else "/tmp")


def _identity(pid: int) -> str:
    """A pid and its start time, which together name one process ever; empty time when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return f"{pid} {stat.rsplit(')', 1)[1].split()[19]}"
    except (OSError, IndexError):
        return f"{pid} "
