"""Which rank failed first, and why: one rank's failure makes the others fail in their collectives."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ...shardplan.errors import RankError
from ..messages import Failed
from .node_messages import SILENCE_SECONDS
from .rank_process import STACK_SECONDS, RankProcess
from .remote_rank import RemoteRank

log = logging.getLogger("mgtp.launch")

Rank = RankProcess | RemoteRank

OWN_WORDS_SECONDS = 0.5
"""How long a rank that has ended may take to be heard."""

CAUSE_SECONDS = 3.0
"""How long to look for the cause when ranks complain only of others: a large process takes its time to end."""


class Inquest:
    """Collects what ranks say once one has failed, until the cause is known or no more is to be expected."""

    def __init__(self, ranks: Sequence[Rank], failures: Sequence[Failed] = ()) -> None:
        self._ranks, self._failures = ranks, list(failures)
        self._begin = time.monotonic()
        nodes = any(isinstance(e, RemoteRank) for e in ranks)  # one that is gone is known by its silence
        self._cause_seconds = CAUSE_SECONDS + (SILENCE_SECONDS if nodes else 0)

    def add(self, message: object) -> None:
        """Another message from a rank."""
        if isinstance(message, Failed):
            self._failures.append(message)

    @property
    def is_closed(self) -> bool:
        """Whether there is nothing to wait for any more."""
        if self._own:
            return True
        seconds = OWN_WORDS_SECONDS if self._silent else self._cause_seconds
        return time.monotonic() - self._begin >= seconds

    @property
    def _own(self) -> list[Failed]:
        """Failures that no other rank can have caused."""
        return [f for f in self._failures if not f.collective]

    @property
    def _silent(self) -> list[RankProcess]:
        """Ranks that ended without a word."""
        spoke = {f.rank for f in self._failures}
        return [e for e in self._ranks if isinstance(e, RankProcess) and e.rank not in spoke and e.has_exited]

    def verdict(self) -> RankError:
        """The error of the rank that failed first: its own words, or how it ended and the end of its stderr."""
        if self._own:
            return self._spoken(self._own[0])
        if self._silent:
            return silent_error(self._silent[0])
        return self._spoken(self._failures[0])

    def _spoken(self, failure: Failed) -> RankError:
        show_tail(next((e for e in self._ranks if e.rank == failure.rank), None))
        error = RankError(f"rank {failure.rank} failed in stage {failure.stage!r}: {failure.message}", failure.hint)
        error.exit_code = failure.exit_code
        return error


def silent_error(entry: RankProcess) -> RankError:
    """The error for a rank that ended without saying why."""
    tail = show_tail(entry)
    killed = entry.how_it_ended.endswith("SIGKILL")
    hint = (
        "the kernel may have run out of memory: see dmesg" if killed else "run again with --debug to see all it prints"
    )
    last = f": {tail[-1]}" if tail else ""
    return RankError(f"rank {entry.rank} {entry.how_it_ended} in stage {entry.last_stage!r}{last}", hint)


def stalled_error(ranks: Sequence[Rank], what: tuple[str, str], way_out: str) -> RankError:
    """The error when nothing comes from `ranks` any more, naming those on which the others wait.

    `what` they do, or do not, of one rank and of several.

    Every rank is asked where its Python is: one that waits in a collective is not the one that is late.
    """
    _ask_for_stacks(ranks)
    late = [e for e in ranks if e.waits_for_others is False]
    late = late or [e for e in ranks if e.waits_for_others is None] or list(ranks)
    for entry in late:
        show_tail(entry)
    numbers = ", ".join(str(e.rank) for e in late)
    done = f"rank {numbers} {what[0]}" if len(late) == 1 else f"ranks {numbers} {what[1]}"
    place = _place(late[0])
    return RankError(
        f"{done}, stage {late[0].last_stage!r}{place}", f"{way_out}run again with --debug to see all that ranks print"
    )


def _ask_for_stacks(ranks: Sequence[Rank]) -> None:
    for entry in ranks:
        entry.ask_for_stack()
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and not all(e.stack for e in ranks if isinstance(e, RankProcess)):
        time.sleep(0.05)
    time.sleep(0.05)  # the rest of the last stack


def _place(entry: Rank) -> str:
    """The innermost frame of a late rank: ', at FILE:LINE in NAME'."""
    return f", at {entry.stack[0]}" if entry.stack else ", and does not say where it is"


def show_tail(entry: Rank | None) -> list[str]:
    """Log the end of a rank's stderr, which is also returned."""
    tail = entry.last_words() if entry is not None else []
    for line in tail:
        log.error("rank %d: %s", entry.rank if entry is not None else -1, line)
    return tail
