"""Writing by threads: who writes decides how long to wait for a reader that has stopped (a full pipe, Ctrl-S)."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ..shardplan.workers import start_threads
from .console import READER_SECONDS

MAX_PIECES = 10_000
"""Pieces of text that wait for a reader of stderr; what comes after them is dropped, and counted."""

LOOK_SECONDS = 0.05
"""Time between two looks at what goes on while a reader of stdout takes nothing."""


class BackgroundWriter:
    """A thread that writes to a file without a buffer, whose lock the interpreter would wait for at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: queue.Queue[bytes | None] = queue.Queue(MAX_PIECES)
        self.error: OSError | None = None
        start_threads([threading.Thread(target=self._write, daemon=True)])

    def put(self, content: bytes | None) -> None:
        """Have something written after all that was put before; None ends the thread. Raises queue.Full."""
        self._pieces.put_nowait(content)

    def wait(self, seconds: float) -> bool:
        """Whether everything has been written, waiting `seconds` for it."""
        done = self._pieces.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._pieces.unfinished_tasks, seconds)

    def _write(self) -> None:
        for content in iter(self._pieces.get, None):
            try:
                while content:
                    content = content[os.write(self._descriptor, content) :]
            except OSError as error:
                self.error = error
            self._pieces.task_done()
        self._pieces.task_done()


class BackgroundStderr(io.TextIOBase):
    """Stands for stderr. Writing waits for the reader as ever, but not for one that has stopped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._writer = stream, BackgroundWriter(stream.fileno())
        self._is_stuck = self._has_ended = False
        self._num_dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As that of the stream it stands for."""
        return self._stream.encoding

    def fileno(self) -> int:
        """As above."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """As above."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """It is for nothing else."""
        return True

    def write(self, text: str, /) -> int:
        """Write, or drop what has no room; waits once, and again only when the reader has taken everything."""
        if self._has_ended:
            return len(text) if self._is_stuck else self._stream.write(text)
        try:
            if self._num_dropped and self._writer.wait(0):
                self._put(f"{self._num_dropped} piece(s) of output dropped: nobody read them\n")
                self._num_dropped = 0
            self._put(text)
            self._wait()
        except queue.Full:
            self._num_dropped += 1
        return len(text)

    def end(self) -> None:
        """Give the reader a last moment."""
        self._is_stuck, self._has_ended = False, True
        self._wait()
        with suppress(queue.Full):
            self._writer.put(None)

    def _put(self, text: str) -> None:
        self._writer.put(text.encode(self.encoding, "backslashreplace"))

    def _wait(self) -> None:
        self._is_stuck = not self._writer.wait(0 if self._is_stuck else READER_SECONDS)


@contextmanager
def stderr_in_background() -> Iterator[None]:
    """Let nothing that writes to stderr wait for a reader that has stopped: logs, live lines, warnings of libraries."""
    stream = sys.stderr
    if not _is_file(stream):
        yield
        return
    stream.flush()
    sys.stderr = stderr = BackgroundStderr(stream)
    try:
        yield
    finally:
        sys.stderr = stream
        stderr.end()


@contextmanager
def watched_stdout(watch: Callable[[], None]) -> Iterator[Callable[[str | bytes], None]]:
    """A function that writes to stdout, and calls `watch` again and again while the reader takes nothing.

    It returns when all is written, so a reader sets the pace; it raises what `watch` raises, and OSError.
    """
    stream = sys.stdout
    if not _is_file(stream):

        def write_at_once(content: str | bytes) -> None:
            stream.write(content if isinstance(content, str) else content.decode())
            stream.flush()

        yield write_at_once
        return
    stream.flush()
    writer = BackgroundWriter(stream.fileno())

    def write(content: str | bytes) -> None:
        writer.put(
            content if isinstance(content, bytes) else content.encode(stream.encoding, stream.errors or "strict")
        )
        while not writer.wait(LOOK_SECONDS):
            watch()
        if writer.error is not None:
            writer.error.filename = "standard output"  # for whoever reports it
            raise writer.error

    try:
        yield write
    finally:
        writer.put(None)


def _is_file(stream: TextIO | None) -> bool:
    """Whether a stream has a descriptor: not when it is closed, or a test's."""
    try:
        return stream is not None and stream.fileno() >= 0
    except (OSError, ValueError):
        return False
