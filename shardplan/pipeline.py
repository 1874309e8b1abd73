"""One pass over a checkpoint that fills all rank files at once: reading and writing overlap, memory stays bounded.

The caller's thread reads windows of rows in file order, checks them and hands each to every worker. A worker owns some
of the ranks and takes their parts of each window in turn: copying, converting, hashing and writing all let other
threads run. Queues hold few windows, so a slow disk slows the reading down instead of filling memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import CheckpointError
from .hashing import new_hash
from .journal import Journal, Record
from .rank_file import RankFile
from .slicing import check_finite, part_of_window, windows
from .sources.base import Source

_QUEUED_WINDOWS = 4

_LARGE_WINDOW = 8 << 20
"""Bytes of a window (a single large row) before whose successor is read everything has to be written."""


@dataclass(frozen=True)
class _Window:
    """Rows of the tensor of group `index`, from row `start` on; with the first and the last window of each marked."""

    index: int
    start: int
    values: np.ndarray
    is_first: bool
    is_last: bool


class _Worker(threading.Thread):
    """Writes the files of some ranks. After a failure it keeps taking windows, so that nobody waits for it."""

    def __init__(self, files: Sequence[RankFile], finished: Callable[[int, int, str], None]) -> None:
        super().__init__(name="mgtp-writer", daemon=True)
        self.files = files
        self.windows: queue.Queue[_Window | None] = queue.Queue(_QUEUED_WINDOWS)
        self.failure: Exception | None = None
        self.is_abandoned = False
        self._finished = finished

    def run(self) -> None:
        while (window := self.windows.get()) is not None:
            if self.failure is None and not self.is_abandoned:
                try:
                    self._write(window)
                except Exception as error:
                    self.failure = error
            del window  # its memory is free before the next one comes
            self.windows.task_done()

    def _write(self, window: _Window) -> None:
        for file in self.files:
            if file.done > window.index:
                continue
            if window.is_first:
                file.begin(window.index)
            source = file.groups[window.index].tensor.source
            assert source is not None
            file.append(window.index, part_of_window(window.values, window.start, source))
            if window.is_last:
                self._finished(window.index, file.plan.rank, file.end(window.index))


class Progress:
    """Records of the tensors that all ranks have, journaled in file order as they become complete."""

    def __init__(self, journal: Journal, num_ranks: int) -> None:
        self.journal = journal
        self._num_ranks = num_ranks
        self._sources: dict[int, str] = {}
        self._ranks: dict[int, dict[int, str]] = {}
        self._news: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()

    def report(self, index: int, rank: int, tensor_hash: str) -> None:
        """A rank has written the tensor of group `index`. Any thread."""
        self._news.put((index, rank, tensor_hash))

    def read(self, index: int, source_hash: str) -> None:
        """The tensor of group `index` has been read."""
        self._sources[index] = source_hash

    def collect(self) -> None:
        """Journal what has become complete; called by one thread."""
        records = self.journal.records
        while not self._news.empty():
            index, rank, tensor_hash = self._news.get()
            if index >= len(records):
                self._ranks.setdefault(index, {})[rank] = tensor_hash
            elif records[index].ranks[rank] != tensor_hash:  # written again after a power failure
                raise CheckpointError("the checkpoint changed since the interrupted run", "run again with --force")
        while len(self._ranks.get(len(records), {})) == self._num_ranks and len(records) in self._sources:
            index = len(records)
            hashes = self._ranks.pop(index)
            self.journal.append(Record(self._sources.pop(index), [hashes[rank] for rank in sorted(hashes)]))


def write_tensors(
    source: Source,
    files: Sequence[RankFile],
    journal: Journal,
    threads: int,
    on_read: Callable[[int], None],
) -> None:
    """Write every tensor that a file lacks, and journal it. `on_read` gets the bytes of every window that was read.

    Raises CheckpointError for values that are not acceptable, OSError when writing fails.
    """
    progress = Progress(journal, len(files))
    first = min(file.done for file in files)
    workers = [_Worker(files[i::threads], progress.report) for i in range(min(threads, len(files)))]
    for worker in workers:
        worker.start()
    try:
        for index in range(first, len(files[0].groups)):
            _read_tensor(source, index, files[0].groups[index].tensor.name, workers, progress, on_read)
    except BaseException:
        for worker in workers:
            worker.is_abandoned = True
        raise
    finally:
        for worker in workers:
            worker.windows.put(None)
        for worker in workers:
            worker.join()
    _raise_failures(workers)
    progress.collect()


def _read_tensor(
    source: Source,
    index: int,
    name: str,
    workers: Sequence[_Worker],
    progress: Progress,
    on_read: Callable[[int], None],
) -> None:
    """Hand every window of one tensor to all workers."""
    info = source.tensors[name]
    running = new_hash() if source.fingerprint is None else None
    num_rows = info.shape[0] if info.shape else 1
    for start, stop in windows(info):
        values = source.rows(name, start, stop)
        check_finite(values, name)
        if running is not None:
            running.update(values.reshape(-1).view(np.uint8).data)
        window = _Window(index, start, values, start == 0, stop == num_rows)
        for worker in workers:
            worker.windows.put(window)
        if values.nbytes > _LARGE_WINDOW:
            for worker in workers:
                worker.windows.join()
        _raise_failures(workers)
        progress.collect()
        on_read(values.nbytes)
    progress.read(index, running.hexdigest() if running is not None else "")


def _raise_failures(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
