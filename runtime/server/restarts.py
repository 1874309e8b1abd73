"""When ranks that have failed may be started again: ever longer pauses, and a limit. Pure: the time is given."""

from __future__ import annotations

from collections import deque

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
WINDOW_SECONDS = 600.0
"""How far back restarts count against the limit, and lengthen the pause."""


class Restarts:
    """The restarts of one model; `limit` of them within WINDOW_SECONDS, none when it is 0."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._recent: deque[float] = deque()

    def allowed(self, now: float) -> bool:
        """Whether another restart is within the limit at `now` (monotonic seconds)."""
        while self._recent and now - self._recent[0] > WINDOW_SECONDS:
            self._recent.popleft()
        return len(self._recent) < self.limit

    def note(self, now: float) -> float:
        """Count a restart that was decided on at `now`; the seconds to wait before it."""
        pause = FIRST_PAUSE_SECONDS
        for _ in self._recent:
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._recent.append(now)
        self.count += 1
        return pause
