"""Output rules: stdout carries results only, everything else goes to stderr; colours and bars only on a terminal."""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import Any

from ..shardplan.values import escaped
from ..shardplan.workers import start_threads

MAX_RECORDS = 10_000
"""Log records that wait for a reader of stderr; what comes after them is dropped, and counted."""

READER_SECONDS = 0.5
"""How long a reader of stderr has at the end to take what is left."""


def set_up_logging(level: str, form: str = "text") -> None:
    """Send log records to stderr as plain lines, or with `form` 'json' as a JSON object each."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(levelname).1s %(message)s" if level == "debug" else "%(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else plain)
    if form != "json":
        handler.addFilter(OneLine())
    ours = logging.getLogger("mgtp")
    ours.handlers[:] = [handler]
    ours.setLevel(level.upper())
    ours.propagate = False


@contextmanager
def log_in_background() -> Iterator[None]:
    """Let a thread write the log, that of libraries included: whoever logs never waits for a reader of stderr.

    Set up logging before. Records go to the thread until the process ends, also when it has been left behind, stuck.
    """
    ours, libraries = logging.getLogger("mgtp"), logging.getLogger()
    (form,), descriptor = ours.handlers, _stderr_descriptor()
    if descriptor is None:
        yield
        return
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_RECORDS)
    handler = DroppingHandler(records)
    handler.filters[:] = form.filters
    ours.handlers[:] = [handler]
    libraries.addHandler(handler)
    logging.captureWarnings(True)

    def write() -> None:
        for record in iter(records.get, None):
            _write(descriptor, form.format(record) + "\n")

    thread = threading.Thread(target=write, daemon=True)
    start_threads([thread])
    try:
        yield
    finally:
        logging.captureWarnings(False)
        libraries.removeHandler(handler)
        with suppress(queue.Full):
            records.put(None, timeout=READER_SECONDS)
            thread.join(READER_SECONDS)


def _write(descriptor: int, text: str) -> None:
    """Write without a buffer, whose lock the interpreter would wait for at the end. What cannot be written is lost."""
    content = text.encode(errors="backslashreplace")
    with suppress(OSError):
        while content:
            content = content[os.write(descriptor, content) :]


class DroppingHandler(QueueHandler):
    """Puts records into a queue; drops those for which there is no room, and says how many once there is again."""

    def __init__(self, records: queue.Queue[Any]) -> None:
        super().__init__(records)
        self._num_dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """Runs under the handler's lock."""
        records: queue.Queue[Any] = self.queue  # type: ignore[assignment]
        try:
            if self._num_dropped:
                if records.qsize() > records.maxsize // 2:  # else every other line would be about the one before
                    raise queue.Full
                text = f"{self._num_dropped} log line(s) dropped: nobody read them"
                records.put_nowait(logging.LogRecord(record.name, logging.WARNING, "", 0, text, None, None))
                self._num_dropped = 0
            records.put_nowait(record)
        except queue.Full:
            self._num_dropped += 1


def stderr_is_stuck() -> bool:
    """Whether the reader of stderr has stopped, so that a last word would never be said."""
    descriptor = _stderr_descriptor()
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return not poll.poll(READER_SECONDS * 1000)


def _stderr_descriptor() -> int | None:
    """The file that stderr is, None where it is none, or closed."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None


class OneLine(logging.Filter):
    """Makes a record's message one line, whatever the names in it hold; a traceback that follows keeps its lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record through."""
        record.msg, record.args = escaped(record.getMessage()), None
        return True


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; what is passed as `extra={"fields": {...}}` becomes keys of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        message = {"event": "request", **fields} if fields else {"message": record.getMessage()}
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": when, "level": record.levelname.lower(), "logger": record.name, **message})


def stderr_is_terminal() -> bool:
    """Whether progress bars make sense: stderr is a terminal, and nobody asked for plain output."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_json(document: Any) -> None:
    """Write one JSON document to stdout."""
    sys.stdout.buffer.write(json_line(document))
    sys.stdout.flush()


def json_line(document: Any) -> bytes:
    """A JSON document and the end of its line. Accepts what msgspec encodes: structs, dataclasses, dicts."""
    import msgspec

    return msgspec.json.encode(document) + b"\n"


def human_bytes(size: float) -> str:
    """'1.5 GiB': binary units, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
