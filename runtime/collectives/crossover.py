"""Which backend is the fastest from which message size on. No torch: the front shows it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..messages import CollectiveFigure


class CrossOver(msgspec.Struct):
    """From messages of `size` bytes on, `backend` is the fastest."""

    size: int
    backend: str


def cross_overs(figures: Sequence[CollectiveFigure]) -> list[CrossOver]:
    """Where the fastest backend changes, beginning at the smallest size. Wrong sums do not count."""
    points: list[CrossOver] = []
    for size in sorted({f.size for f in figures if f.verified}):
        best = min((f for f in figures if f.size == size and f.verified), key=lambda f: f.latency)
        if not points or points[-1].backend != best.backend:
            points.append(CrossOver(size, best.backend))
    return points
