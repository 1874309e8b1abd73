"""Who has which positions of a sequence: pure functions. Ranges are half-open [start, stop).

Causal attention gives a late position more to do than an early one. Cut into 2 N pieces, of which rank r of N takes
one from the head and one from the tail (r and 2 N - 1 - r), every rank has the same amount to do (Brandon et al. 2023,
"Striped Attention", compares such layouts; Llama 3, Dubey et al. 2024, section 3.3.2, uses this one).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ...shardplan.errors import UsageError
from .sizes import agree

Range = tuple[int, int]


@dataclass(frozen=True)
class SequenceLayout:
    """Which positions every rank has, as ranges in the rank's order. Together they are [0, length), each position once."""

    length: int
    pieces: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        end = 0
        for start, stop in sorted(piece for own in self.pieces for piece in own if piece[0] != piece[1]):
            if start != end or stop < start:
                self._refuse(f"after [0, {end}) comes [{start}, {stop})")
            end = stop
        if end != self.length:
            self._refuse(f"they end at {end}")

    def _refuse(self, fault: str) -> None:
        raise UsageError(
            f"the pieces of a layout of {self.length} positions: {fault}", "every position belongs to one rank"
        )

    @property
    def sizes(self) -> list[int]:
        """How many positions each rank has."""
        return [sum(stop - start for start, stop in pieces) for pieces in self.pieces]


def even_ranges(length: int, parts: int) -> list[Range]:
    """[0, length) in `parts` ranges whose sizes differ by at most one; some are empty when there are more than positions."""
    if length < 0 or parts < 1:
        raise UsageError(f"{length} positions in {parts} parts", "share 0 positions or more out over at least 1")
    return list(pairwise(length * i // parts for i in range(parts + 1)))


def head_and_tail(length: int, ranks: int) -> SequenceLayout:
    """The layout that balances causal attention: rank r has pieces r and 2 N - 1 - r of 2 N."""
    pieces = even_ranges(length, 2 * ranks)
    return SequenceLayout(length, tuple((pieces[r], pieces[2 * ranks - 1 - r]) for r in range(ranks)))


def one_after_another(layouts: Iterable[SequenceLayout], ranks: int) -> SequenceLayout:
    """Several sequences laid out as one: each rank has its pieces of the first, then of the second, and so on."""
    length, pieces = 0, [[] for _ in range(ranks)]
    for layout in layouts:
        agree("ranks of a layout", len(layout.pieces), ranks)
        for own, theirs in zip(pieces, layout.pieces, strict=True):
            own += [(length + start, length + stop) for start, stop in theirs]
        length += layout.length
    return SequenceLayout(length, tuple(map(tuple, pieces)))
