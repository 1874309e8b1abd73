"""Output rules: stdout carries results only, everything else goes to stderr; colours and bars only on a terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any


def set_up_logging(level: str, form: str = "text") -> None:
    """Send log records to stderr as plain lines, or with `form` 'json' as a JSON object each."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(levelname).1s %(message)s" if level == "debug" else "%(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else plain)
    root = logging.getLogger("mgtp")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


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
    """Write one JSON document to stdout. Accepts what msgspec encodes: structs, dataclasses, dicts."""
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.flush()


def human_bytes(size: float) -> str:
    """'1.5 GiB': binary units, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
