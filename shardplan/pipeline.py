"""One pass over a checkpoint that fills all rank files at once, with several threads and bounded memory.

A thread takes a window of rows all the way: reads it, checks it, takes each rank's part, hashes and writes. So a window
stays in one core's cache, and reading, computing and writing overlap. Only what has to be in order is: reading, which
one thread does at a time, front to back, and hashing. The number of windows in memory is the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from .errors import CheckpointError
from .hashing import new_hash
from .journal import Journal, Record
from .plan import SourceSlice, TensorPlan
from .rank_file import RankFile
from .slicing import as_bytes, check_finite, convert, part_of_window, windows
from .workers import start_threads, usable_cores

if TYPE_CHECKING:
    import numpy as np

    from .sources.base import Source, TensorInfo

_LARGE_WINDOW = 8 << 20
"""Bytes of a window (a single large row) beside which no other is held in memory."""

_PROGRESS_SECONDS = 0.05
_MAX_THREADS = 8
_MOST_THREADS = 64
"""Even where more are asked for: starting them would take longer than the work."""


@dataclass
class _Target:
    """A rank's part of the tensor at hand: where its next bytes go, and their running hash."""

    file: RankFile
    tensor: TensorPlan
    source: SourceSlice
    position: int
    running: xxhash.xxh3_128 = field(default_factory=new_hash)


@dataclass
class _Tensor:
    """The tensor of group `index` on its way. `source_hash` is None where the checkpoint's fingerprint is known."""

    index: int
    info: TensorInfo
    targets: list[_Target]
    unwritten_windows: int
    source_hash: xxhash.xxh3_128 | None


@dataclass(frozen=True)
class _Window:
    """Rows [start, stop) of a tensor; `ticket` counts windows in the order in which they are read and hashed."""

    ticket: int
    tensor: _Tensor
    start: int
    stop: int


class _Stopped(Exception):
    """Another thread failed, or the pass was abandoned."""


class Pass:
    """All tensors that some file lacks, in file order. `run` is what each thread does; `bytes_done` counts values."""

    def __init__(self, source: Source, files: Sequence[RankFile], journal: Journal) -> None:
        self.bytes_done = 0
        self.failure: BaseException | None = None
        self._source, self._files, self._journal = source, files, journal
        self._windows = self._all_windows()
        self._reading = threading.Lock()
        self._state = threading.Condition()  # guards everything below, bytes_done and the journal
        self._hashed = 0
        self._is_stopped = False
        self._complete: dict[int, _Tensor] = {}

    def run(self) -> None:
        """Take windows until there are none; keeps the first failure of all threads."""
        try:
            while self._advance():
                pass
        except _Stopped:
            pass
        except BaseException as error:
            self.stop(error)

    def stop(self, failure: BaseException | None = None) -> None:
        """Let every thread end after what it is doing now."""
        with self._state:
            self.failure = self.failure or failure
            self._is_stopped = True
            self._state.notify_all()

    def _all_windows(self) -> Iterator[_Window]:
        ticket = 0
        for index in range(min(file.done for file in self._files), len(self._files[0].groups)):
            tensor, ranges = self._begin(index)
            for start, stop in ranges:
                yield _Window(ticket, tensor, start, stop)
                ticket += 1

    def _begin(self, index: int) -> tuple[_Tensor, list[tuple[int, int]]]:
        """A tensor and its windows; the padding before it is written."""
        targets = []
        for file in self._files:
            if file.done > index:
                continue  # an interrupted run has left it whole
            group = file.groups[index]
            for pad in group.pads:
                file.write(bytes(pad.bytes), pad.offset)
            assert group.tensor.source is not None
            targets.append(_Target(file, group.tensor, group.tensor.source, group.tensor.offset))
        info = self._source.tensors[targets[0].tensor.name]
        ranges = list(windows(info))
        source_hash = new_hash() if self._source.fingerprint is None else None
        return _Tensor(index, info, targets, len(ranges), source_hash), ranges

    def _advance(self) -> bool:
        """Handle one window; false when there is none left."""
        with self._reading:
            window = None if self._is_stopped else next(self._windows, None)
            if window is None:
                return False
            values = self._source.rows(window.tensor.info.name, window.start, window.stop)
            if values.nbytes > _LARGE_WINDOW:
                self._handle(window, values)
                return True
        self._handle(window, values)
        return True

    def _handle(self, window: _Window, values: np.ndarray) -> None:
        """Check, cut, convert, hash (in order) and write one window."""
        tensor = window.tensor
        check_finite(values, tensor.info.name)
        parts = [
            [
                as_bytes(convert(part, t.tensor.dtype, t.tensor.name))
                for part in part_of_window(values, window.start, t.source)
            ]
            for t in tensor.targets
        ]
        writes: list[tuple[RankFile, memoryview, int]] = []
        with self._turn(window.ticket):
            if tensor.source_hash is not None:
                tensor.source_hash.update(as_bytes(values))
            for target, pieces in zip(tensor.targets, parts, strict=True):
                for data in pieces:
                    target.running.update(data)
                    writes.append((target.file, data, target.position))
                    target.position += len(data)
        for file, data, position in writes:
            file.write(data, position)
        self._wrote(tensor, values.nbytes)

    @contextmanager
    def _turn(self, ticket: int) -> Iterator[None]:
        """Wait until all windows before have been hashed."""
        with self._state:
            self._state.wait_for(lambda: self._hashed == ticket or self._is_stopped)
            if self._is_stopped:
                raise _Stopped
        yield
        with self._state:
            self._hashed += 1
            self._state.notify_all()

    def _wrote(self, tensor: _Tensor, num_bytes: int) -> None:
        """Count a window, and journal the tensors that have become complete, in file order."""
        with self._state:
            self.bytes_done += num_bytes
            tensor.unwritten_windows -= 1
            if tensor.unwritten_windows:
                return
            self._complete[tensor.index] = tensor
            records = self._journal.records
            if tensor.index < len(records):
                _check_same(self._complete.pop(tensor.index), records[tensor.index])
            while (done := self._complete.pop(len(records), None)) is not None:
                self._journal.append(_record(done))


def _record(tensor: _Tensor) -> Record:
    for t in tensor.targets:
        if t.position != t.tensor.offset + t.tensor.bytes:
            raise RuntimeError(f"{t.file.path.name}: {t.tensor.name} ends at {t.position}, not where the plan says")
    source_hash = tensor.source_hash.hexdigest() if tensor.source_hash is not None else ""
    return Record(source_hash, [t.running.hexdigest() for t in tensor.targets])


def _check_same(tensor: _Tensor, record: Record) -> None:
    """What is written again after a power failure has to be what was journaled before it."""
    if any(record.ranks[t.file.plan.rank] != t.running.hexdigest() for t in tensor.targets):
        raise CheckpointError("the checkpoint changed since the interrupted run", "run again with --force")


def write_tensors(
    source: Source, files: Sequence[RankFile], journal: Journal, threads: int | None, progress: Callable[[int], None]
) -> None:
    """Write every tensor that a file lacks, and journal it. `progress` gets the bytes of values handled so far.

    Raises CheckpointError for values that are not acceptable, OSError when writing fails. Interrupted at any moment,
    the journal holds only what is in the files.
    """
    work = Pass(source, files, journal)
    count = min(threads or min(_MAX_THREADS, usable_cores()), _MOST_THREADS)
    workers = [threading.Thread(target=work.run, name=f"mgtp-shard-{i}", daemon=True) for i in range(count)]
    try:
        start_threads(workers)
        for worker in workers:
            while worker.is_alive():
                worker.join(_PROGRESS_SECONDS)
                progress(work.bytes_done)
                for file in files:  # here, where it keeps no window waiting
                    file.start_writeback()
    finally:
        work.stop()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
    if work.failure is not None:
        raise work.failure
    progress(work.bytes_done)
