"""Whether somebody uses a shard set: a shared lock on its folder, which ends with its holder and leaves no file behind."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InUse:
    """Holds a folder for as long as this object, or this process, lives. Any number may hold it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)


def hold(folder: Path) -> InUse | None:
    """Hold a folder; None when it is not there, or was removed while it was waited for."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    held = InUse(fd)
    _try_lock(fd, fcntl.LOCK_SH)  # waits for one who removes it, which takes a moment
    try:
        return held if os.path.samestat(os.fstat(fd), os.stat(folder)) else None
    except FileNotFoundError:
        return None


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody holds the folder, and nobody will within the block. True where it cannot be locked."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _try_lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    """False when another holds it; file systems without locks let everybody."""
    try:
        fcntl.flock(fd, kind)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
