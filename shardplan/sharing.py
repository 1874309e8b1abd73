"""How the units of a model axis are shared out over ranks: pure functions of counts.

Every range is half-open [start, stop); the ranges of the ranks are contiguous and in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Range = tuple[int, int]

_UNITS = (128, 64, 32, 16, 8)
_MIN_UNITS_PER_RANK = 16


def share(units: int, weights: Sequence[int]) -> list[Range]:
    """Share `units` over len(weights) ranks in proportion to `weights`, at least one unit each.

    With equal weights the ranges differ by at most one unit. Cutting the cumulated weight spreads the rounding, so
    no rank collects it from every axis. Raises ValueError when there are fewer units than ranks.
    """
    ranks = len(weights)
    if units < ranks:
        raise ValueError(f"{units} units cannot be shared over {ranks} ranks")
    total = sum(weights)
    cuts, done = [0], 0
    for i, weight in enumerate(weights):
        done += weight
        low, high = cuts[-1] + 1, units - (ranks - 1 - i)
        cuts.append(min(max((2 * units * done + total) // (2 * total), low), high))
    return list(pairwise(cuts))


def share_heads(num_heads: int, num_kv_heads: int, weights: Sequence[int]) -> tuple[list[Range], list[Range]]:
    """Share query heads and the key/value heads they use: (q ranges, kv ranges), one of each a rank.

    A rank always holds a uniform number of q heads per kv head. Up to num_kv_heads ranks take whole kv groups; more
    ranks are shared over the groups and each group's q heads over its ranks, the kv head being copied. Delta-net
    value heads and key heads follow the same rule. Raises ValueError above num_heads ranks.
    """
    ranks, group = len(weights), num_heads // num_kv_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are not a multiple of {num_kv_heads} kv heads")
    if ranks > num_heads:
        raise ValueError(f"{num_heads} heads cannot be shared over {ranks} ranks")
    if ranks <= num_kv_heads:
        kv = share(num_kv_heads, weights)
        return [(a * group, b * group) for a, b in kv], kv
    q: list[Range] = []
    kv = []
    for head, (first, last) in enumerate(_ranks_of_groups(num_kv_heads, group, weights)):
        q += [(head * group + a, head * group + b) for a, b in share(group, weights[first:last])]
        kv += [(head, head + 1)] * (last - first)
    return q, kv


def _ranks_of_groups(groups: int, group_size: int, weights: Sequence[int]) -> list[Range]:
    """Which ranks serve each kv group when ranks outnumber groups: 1 to group_size consecutive ranks a group.

    Equal weights are shared evenly. Otherwise the split that minimises the slowest group's heads per weight.
    """
    ranks = len(weights)
    if len(set(weights)) == 1:
        return share(ranks, [1] * groups)
    # best[r] = (worst load so far, cuts) over all ways in which the groups so far take the first r ranks
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(groups):
        step: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (load, cuts) in best.items():
            for stop in range(start + 1, min(start + group_size, ranks) + 1):
                candidate = (max(load, group_size / sum(weights[start:stop])), (*cuts, stop))
                if stop not in step or candidate < step[stop]:
                    step[stop] = candidate
        best = step
    return list(pairwise(best[ranks][1]))


def aligned_unit(size: int, ranks: int) -> int:
    """Rows or columns a unit of an axis (ffn, vocab) should have over `ranks` ranks.

    A power of two keeps every rank's GEMM on the tensor cores' tiles; it is used only where a rank still gets so many
    units that one more or less is a small imbalance. The largest at which all ranks get equally much comes first; else
    the last unit may be partial.
    """
    wide = [u for u in _UNITS if size >= u * ranks * _MIN_UNITS_PER_RANK]
    return next((u for u in wide if size % (u * ranks) == 0), wide[0] if wide else 1)


def share_size(size: int, unit: int, weights: Sequence[int]) -> list[Range]:
    """Share `size` rows in units of `unit`; only the last range may end inside a unit."""
    ranges = share(-(-size // unit), weights)
    return [(a * unit, min(b * unit, size)) for a, b in ranges]
