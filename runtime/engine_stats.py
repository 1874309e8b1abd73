"""What the leader tells the front about how busy the engine is. No torch."""

from __future__ import annotations

from collections.abc import Callable

from .messages import Stats
from .scheduler import Scheduler

REPORT_SECONDS = 0.25


class StatsReporter:
    """Sends a report every REPORT_SECONDS while there is work, and one whenever the work has run out."""

    def __init__(self, scheduler: Scheduler, send: Callable[[Stats], None]) -> None:
        self._scheduler, self._send = scheduler, send
        self._step_seconds: list[float] = []
        self._due = 0.0

    def note_step(self, begin: float, end: float) -> None:
        """A pass of the engine's loop from `begin` to `end` (monotonic seconds)."""
        if self._scheduler.has_work or self._step_seconds:
            self._step_seconds.append(end - begin)
        if end >= self._due or not self._scheduler.has_work:
            self._due = end + REPORT_SECONDS
            self._report()

    def _report(self) -> None:
        scheduler, pools = self._scheduler, self._scheduler.pools
        total = sum(pool.num_blocks - 1 for pool in pools)  # block 0 of every pool is scratch
        self._send(
            Stats(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                used_blocks=total - sum(pool.num_free for pool in pools),
                total_blocks=total,
                prompt_tokens=scheduler.num_prompt_tokens,
                cached_tokens=scheduler.num_cached_tokens,
                preemptions=scheduler.num_preemptions,
                step_seconds=self._step_seconds,
                queue_seconds=scheduler.queue_seconds,
            )
        )
        self._step_seconds, scheduler.queue_seconds = [], []
