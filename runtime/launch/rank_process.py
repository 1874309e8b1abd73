"""One rank's process as the front sees it: whether it lives, what it wrote to stderr, where its Python is."""

from __future__ import annotations

import collections
import logging
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from ...shardplan.workers import start_threads
from ..stages import SPAWN, stage_file

log = logging.getLogger("mgtp.launch")

STDERR_LINES = 20
STOPPED_SECONDS = 0.5
"""A rank may be suspended for a moment, as by a debugger that attaches; not for longer."""

STACK_SECONDS = 1.0
_STACK_HEAD, _FRAME_BEGIN = "(most recent call first):", '  File "'
_FRAME = re.compile(r'  File "(?:.*/)?([^/]+/[^/]+)", line (\d+) in (.+)')
_WAITING = ("distributed_c10d.py", "communicator", "collectives/", "rank_link.py")
"""Files in which a rank waits for others."""


class RankProcess:
    """A rank's process. `tail` is the end of its stderr, `stack` its frames when last asked, the innermost first.

    `stage` is the last one of which it has sent word.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.rank, self.process, self.stage = rank, process, SPAWN
        self._folder = folder
        self.tail: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self.stack: list[str] = []
        self._stopped_since: float | None = None
        assert process.stderr is not None
        self._collector = threading.Thread(target=self._collect, args=[process.stderr], daemon=True)
        start_threads([self._collector])

    def _collect(self, stream: IO[bytes]) -> None:
        """Keep the last lines of stderr; runs in a thread until the rank closes it."""
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                if frame := _FRAME.fullmatch(line):
                    self.stack.append("{}:{} in {}".format(*frame.groups()))
                elif line and not line.startswith(_FRAME_BEGIN) and not line.endswith(_STACK_HEAD):
                    self.tail.append(line)
                log.debug("rank %d: %s", self.rank, line)

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    @property
    def has_failed(self) -> bool:
        """Whether the process has ended badly, or is suspended."""
        return self.process.poll() not in (None, 0) or self.is_stopped()

    @property
    def last_stage(self) -> str:
        """The stage that it was in when it ended, even if there was no time to send word of it."""
        try:
            return stage_file(self._folder, self.rank).read_text() or self.stage
        except OSError:
            return self.stage

    @property
    def how_it_ended(self) -> str:
        """'was killed by SIGKILL' or 'exited with code 1'."""
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def last_words(self) -> list[str]:
        """The end of stderr, complete when the process has ended."""
        if self.has_exited:
            self._collector.join(STACK_SECONDS)
        return list(self.tail)

    def is_stopped(self) -> bool:
        """Whether the process has been suspended (SIGSTOP) for more than a moment."""
        if _state(self.process.pid) != "T":
            self._stopped_since = None
            return False
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        return now - self._stopped_since >= STOPPED_SECONDS

    def ask_for_stack(self) -> None:
        """Let the rank write where its Python is; it needs no interpreter lock for that (runtime/rank.py)."""
        self.stack = []
        if self.stage != SPAWN and not self.has_exited:  # a rank that has not begun to run would be ended by it
            self.process.send_signal(signal.SIGUSR1)

    @property
    def waits_for_others(self) -> bool | None:
        """Whether the stack shows a rank in a collective, or waiting to be told what to do."""
        return any(name in frame for frame in self.stack[:3] for name in _WAITING)


def _state(pid: int) -> str:
    """The state letter of a process in /proc, empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
