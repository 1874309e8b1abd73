"""A time limit that counts only while this process runs."""

from __future__ import annotations

import time

LONGEST_GAP = 1.0
"""Seconds between two looks that count. A process that looks many times a second was suspended when more has passed."""


class Patience:
    """Runs out after `seconds` (None: never). A front stopped with Ctrl-Z has waited for nothing meanwhile; neither
    does it hold ranks to blame for messages that it has not read. Look at it at least once a second."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self._waited, self._last = 0.0, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time has run out."""
        now = time.monotonic()
        self._waited += min(now - self._last, LONGEST_GAP)
        self._last = now
        return self.seconds is not None and self._waited >= self.seconds
