"""A rank of another node as the front sees it: by what it says."""

from __future__ import annotations

from ..stages import SPAWN


class RemoteRank:
    """Its own node watches the process, and reports how it ended in its stead."""

    has_exited = False
    waits_for_others: bool | None = None  # its stack is not asked for
    stack: tuple[str, ...] = ()

    def __init__(self, rank: int) -> None:
        self.rank, self.stage = rank, SPAWN

    @property
    def last_stage(self) -> str:
        """The last stage it has sent word of."""
        return self.stage

    def is_stopped(self) -> bool:
        """Suspended ranks are reported by their node."""
        return False

    def ask_for_stack(self) -> None:
        """Nothing to ask."""

    def last_words(self) -> list[str]:
        """Its stderr is shown on its own node."""
        return []
