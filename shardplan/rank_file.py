"""One rank's file while it is written: under a temporary name, tensor after tensor, then checked, synced and renamed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from .errors import MgtpError
from .hashing import hash_bytes, hash_file_range, hash_rank
from .plan import RankPlan, TensorPlan

PARTIAL = ".partial"
"""What is put after a file's name until the file is whole."""

_WRITEBACK_BYTES = 32 << 20


@dataclass
class Group:
    """A tensor and the padding before it: what is written, journaled and checked together."""

    tensor: TensorPlan
    pads: list[TensorPlan] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Offset in the data section at which the next group begins."""
        return self.tensor.offset + self.tensor.bytes


def groups(plan: RankPlan) -> list[Group]:
    """The tensors of a rank in file order, one group each."""
    found: list[Group] = []
    pads: list[TensorPlan] = []
    for tensor in plan.tensors:
        if tensor.source is None:
            pads.append(tensor)
        else:
            found.append(Group(tensor, pads))
            pads = []
    return found


class RankFile:
    """`plan.file` in `folder`; `done` groups of it an earlier run has left."""

    def __init__(self, folder: Path, plan: RankPlan, header: bytes) -> None:
        self.plan = plan
        self.path = folder / plan.file
        self.partial = folder / f"{plan.file}{PARTIAL}"
        self.groups = groups(plan)
        self.header = header
        self.done = 0
        self.is_final = False
        self._fd = -1
        self._unsynced = 0
        self._writing = Lock()

    def recover(self, hashes: Sequence[str], cancelled: Event) -> None:
        """Find out how much of the file an earlier run has left; `hashes` are those of its first tensors.

        Bytes count only when they still have their hash: after a power failure a file may lack what was written.
        """
        whole = len(hashes) == len(self.groups)
        self.is_final = whole and not self.partial.exists() and self.path.exists()
        if not self.is_final and not self.partial.exists():
            return
        with (self.path if self.is_final else self.partial).open("rb") as file:
            for group, expected in zip(self.groups, hashes, strict=False):
                if cancelled.is_set() or not self._holds(file.fileno(), group, expected):
                    break
                self.done += 1
            if self.is_final and not (self.done == len(self.groups) and self._is_whole(file.fileno())):
                self.done, self.is_final = 0, False

    def _holds(self, fd: int, group: Group, expected: str) -> bool:
        start = self.plan.data_offset
        pads_held = all(
            hash_file_range(fd, start + pad.offset, pad.bytes) == hash_bytes(bytes(pad.bytes)) for pad in group.pads
        )
        return pads_held and hash_file_range(fd, start + group.tensor.offset, group.tensor.bytes) == expected

    def _is_whole(self, fd: int) -> bool:
        return os.fstat(fd).st_size == self.plan.bytes and os.pread(fd, len(self.header), 0) == self.header

    def open(self) -> None:
        """Open the temporary file, cut back to the groups that are done."""
        if self.is_final:
            return
        self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, self.plan.data_offset + (self.groups[self.done - 1].end if self.done else 0))
        self._write_at(self.header, 0)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write bytes at `offset` of the data section. Any number of threads may, each to a place of its own."""
        with self._writing:  # two writers of one file would spin for the same lock in the kernel
            self._write_at(data, self.plan.data_offset + offset)
        self._unsynced += len(data)  # an update lost between threads only shifts the next write-back

    def start_writeback(self) -> None:
        """Let the disk begin with what was written, so that the final fsync is not one long wait. Errors show there."""
        if self._unsynced >= _WRITEBACK_BYTES and self._fd >= 0 and _sync_file_range is not None:
            self._unsynced = 0
            _sync_file_range(self._fd, 0, 0, _SYNC_FILE_RANGE_WRITE)

    def finish(self, header: bytes) -> None:
        """Write the final header, check the size, and bring everything to the disk. The name stays temporary."""
        if self.is_final:
            return
        self._write_at(header, 0)
        size = os.fstat(self._fd).st_size
        if size != self.plan.bytes:
            raise MgtpError(f"{self.partial}: {size} bytes were written, not {self.plan.bytes}", "check the disk")
        os.fsync(self._fd)
        self.close()

    def rename(self) -> None:
        """Give the finished file its name."""
        if not self.is_final:
            self.partial.replace(self.path)
            self.is_final = True

    def set_hashes(self, hashes: Sequence[str]) -> None:
        """Fill in the plan: every tensor's hash, that of padding, and the rank's."""
        for group, tensor_hash in zip(self.groups, hashes, strict=True):
            group.tensor.hash = tensor_hash
            for pad in group.pads:
                pad.hash = hash_bytes(bytes(pad.bytes))
        self.plan.hash = hash_rank(t.hash for t in self.plan.tensors)

    def close(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_at(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
