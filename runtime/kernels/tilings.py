"""How the products of linear.py cut their work: what made whole decode steps fastest on an H200 (docs/performance.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .launch import cdiv, power_of_2


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts the work: output rows a program, columns at a time, warps, pipeline stages.

    `splits`: programs that share the columns of a row.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1
    splits: int = 1


MOST_TOKENS = 128
"""Up to which some product is faster here than by cuBLAS."""

PROGRAMS = 160
"""Programs that a product of several tokens should come to, so that every multiprocessor has one and few have two."""

ENOUGH_PROGRAMS = 100
"""With fewer, a tile that uses memory well leaves too much of the device without work."""


def choose(tokens: int, rows: int, columns: int, itemsize: int, gated: bool) -> Tiling | None:
    """The tiling that made whole decode steps fastest on an H200 (docs/performance.md); None where cuBLAS did.

    `rows` and `columns` of W, where `gated` of each half. Between its neighbours a product may prefer another tiling
    than by itself, so benchmarks/step_search.py times steps.
    """
    if tokens == 1:
        return _row_tiling(rows, columns, itemsize, gated)
    if tokens > (MOST_TOKENS if gated else 64) or itemsize > 2:
        return None
    if tokens > 64:  # the larger tile where it still makes enough programs
        large, small = Tiling(128, 64, 8, 4), Tiling(64, 64, 4, 6)
        return next((t for t in (large, small) if cdiv(rows, t.rows) >= ENOUGH_PROGRAMS), None)
    tiles = cdiv(rows, 64)
    splits = 1 << max(0, int(math.log2(PROGRAMS / tiles)))
    splits = min(splits, max(1, power_of_2(columns) // 1024))
    if tokens > 32:
        return Tiling(64, 128, 4, 4 if gated or splits == 1 else 6, splits)
    return Tiling(64, 128, 4, 4 if gated else 6, splits)


def _row_tiling(rows: int, columns: int, itemsize: int, gated: bool) -> Tiling:
    """Of a single token's product: lighter programs where several ranks have a small part of the weights each."""
    if gated:
        together, most, warps = 1, 4096, 8
    elif rows * columns < (1 << 24 if columns <= 4096 else 1 << 25):
        together, most, warps = 2, 1024, 4 if columns <= 2048 else 2
    else:
        together, most, warps = 2 if max(rows, columns) > 8192 else 1, 2048, 4
    return Tiling(rows=together, columns=max(16, min(most, power_of_2(columns)) * 2 // itemsize), warps=warps)
