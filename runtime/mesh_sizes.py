"""How many ranks every mesh axis has: pure functions, without torch. An axis that comes first varies fastest by rank."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..shardplan.errors import UsageError
from ..shardplan.values import counted


def mesh_sizes(
    num_ranks: int, num_kv_heads: int, tp_size: int | None = None, cp_size: int | None = None
) -> dict[str, int]:
    """{"tp": .., "cp": ..} for `num_ranks` ranks, as far as sizes are left open.

    tp gets as many ranks as there are kv heads to share, the rest is cp: more tp would store every kv head several
    times. Raises UsageError, with the numbers, when ranks and sizes make no rectangle.
    """
    if num_ranks < 1:
        raise UsageError(f"a mesh of {num_ranks} ranks", "there must be at least one")
    for option, size in (("tp", tp_size), ("cp", cp_size)):
        if size is not None and (size < 1 or num_ranks % size):
            raise UsageError(
                f"--{option}-size {size} does not divide {counted(num_ranks, 'rank')}",
                f"sizes that do: {', '.join(map(str, _divisors(num_ranks)))}",
            )
    if tp_size is None:
        left = num_ranks // (cp_size or 1)
        tp_size = left if cp_size else max(d for d in _divisors(left) if d <= max(num_kv_heads, 1))
    cp_size = num_ranks // tp_size if cp_size is None else cp_size
    if tp_size * cp_size != num_ranks:
        raise UsageError(
            f"--tp-size {tp_size} x --cp-size {cp_size} is {tp_size * cp_size}, there are {counted(num_ranks, 'rank')}",
            f"use --cp-size {num_ranks // tp_size}, or leave one of the two out",
        )
    return {"tp": tp_size, "cp": cp_size}


def axis_groups(sizes: Mapping[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """The groups of ranks along every axis. The first axis varies fastest: its groups are neighbours.

    {"tp": 2, "cp": 2} -> {"tp": [(0, 1), (2, 3)], "cp": [(0, 2), (1, 3)]}
    """
    world, stride, groups = math.prod(sizes.values()), 1, {}
    for axis, size in sizes.items():
        firsts = [rank for rank in range(world) if rank // stride % size == 0]
        groups[axis] = [tuple(range(first, first + stride * size, stride)) for first in firsts]
        stride *= size
    return groups


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
