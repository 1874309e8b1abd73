"""The log of a server: what there is no room for is dropped and counted, and every other line is written in order."""

from __future__ import annotations

import logging
import queue

from mgtp.cli.console import DroppingHandler


def test_lines_that_nobody_reads_are_dropped_and_counted():
    records: queue.Queue = queue.Queue(4)
    handler = DroppingHandler(records)

    def log(*texts: str) -> None:
        for text in texts:
            handler.handle(logging.LogRecord("mgtp.test", logging.INFO, "", 0, "%s", (text,), None))

    def read(count: int) -> list[str]:
        return [records.get_nowait().getMessage() for _ in range(count)]

    log("a", "b", "c", "d", "e", "f")
    assert read(1) == ["a"]
    log("g")  # there is room for one, which is not yet worth saying
    assert read(3) == ["b", "c", "d"]
    log("h", "i")
    assert read(3) == ["3 log line(s) dropped: nobody read them", "h", "i"]
    assert records.empty()
