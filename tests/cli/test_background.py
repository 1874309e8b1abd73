"""Readers that stop: nothing waits for them for long, what a reader does take is complete and in order."""

from __future__ import annotations

import os
import sys
import time

import pytest

from mgtp.cli import background
from mgtp.shardplan.errors import RankError


@pytest.fixture
def pipe():
    """(what is read from, a stream that writes to it) of a pipe in which not another byte has room."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    try:
        while True:
            os.write(theirs, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(theirs, True)
    with os.fdopen(ours, "rb", buffering=0) as reader, os.fdopen(theirs, "w") as stream:
        yield reader, stream


def read_all(reader, size: int) -> str:
    """The next `size` bytes that are no filling."""
    text = b""
    while len(text) < size:
        text += reader.read(65536).replace(b".", b"")
    return text.decode()


def test_stderr_waits_once_for_a_reader_that_has_stopped_and_counts_what_is_dropped(pipe, monkeypatch):
    reader, stream = pipe
    monkeypatch.setattr(background, "MAX_PIECES", 3)
    monkeypatch.setattr(background, "READER_SECONDS", 0.2)
    stderr = background.BackgroundStderr(stream)
    begin = time.monotonic()
    stderr.write("a\n")  # the thread takes it, and is stuck
    for text in "bcdefg":
        stderr.write(f"{text}\n")
    assert 0.2 <= time.monotonic() - begin < 2
    assert read_all(reader, 8) == "a\nb\nc\nd\n"
    stderr._writer.wait(5)
    stderr.write("h\n")
    expected = "3 piece(s) of output dropped: nobody read them\nh\n"
    assert read_all(reader, len(expected)) == expected
    stderr.end()


def test_stdout_has_the_ranks_watched_while_its_reader_takes_nothing(pipe, monkeypatch):
    reader, stream = pipe
    monkeypatch.setattr(sys, "stdout", stream)
    looks = []

    def watch() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise RankError("rank 1 has gone")

    with pytest.raises(RankError, match="rank 1"), background.watched_stdout(watch) as write:
        write("never read in time")
    assert len(looks) == 3
    assert read_all(reader, 18) == "never read in time"
    with background.watched_stdout(watch) as write:
        write("é")
        write(b"\n")
    assert read_all(reader, 3) == "é\n"


def test_stdout_that_cannot_be_written_is_an_error(pipe, monkeypatch):
    reader, stream = pipe
    monkeypatch.setattr(sys, "stdout", stream)
    reader.close()
    with pytest.raises(BrokenPipeError), background.watched_stdout(lambda: None) as write:
        write("x")
