"""Top-k and top-p without sorting: of every row, the key up to which tokens are kept, found by exact counts and sums.

A launch shares each row's tokens out over a few ranges of keys and finds the one that the edge lies in; a second does
so once more. The third lists the keys in the range that is left, few as a rule, and narrows it down to one key. Keys and weights are those
of `draw.py`; the order in which programs finish does not matter, since only whole numbers are added up.

Shapes: S sequences of the batch, R of them drawn by chance, V vocabulary (padding included).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .argmax import counters
from .draw import LIBRARY, keys_of, weigh
from .launch import Kernel, cdiv, power_of_2, start_dependents, wait_for_inputs

BLOCK, CHUNK = 4096, 512
"""Tokens of a program, and tokens that are looked at together where the edge is found."""
WAYS = tl.constexpr(8)
"""Ranges that are told apart at a time."""
_INFINITE = tl.constexpr(0x7F800000)
_SHIFT, _LOWEST = tl.constexpr(22), tl.constexpr(127 << 23)
"""Ranges of half an octave, the first of them from 1 on; with what lies outside they end at 1.5, 2, 3, 4, 6, 8 and 12."""


@triton.jit
def _enough(top_p, total):
    """The smallest sum of weights that top_p is satisfied with."""
    return tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def _coarse(
    logits_ptr, ids_ptr, rows_ptr, temperatures, top_ks, top_ps, sums, ranges, counters, V, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, LIBRARY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and BLOCK of its tokens: what falls into each range. The last program of a row finds the edge's range.

    `ranges` int64 [R, 4], read unless FIRST: the lowest and the highest key that the edge may be, what lies below, and
    what is needed up to the edge: tokens for top-k, else weight.
    """
    start_dependents(PDL)
    wait_for_inputs(PDL)
    r, split = tl.program_id(0), tl.program_id(1)
    top_k, top_p = tl.load(top_ks + r), tl.load(top_ps + r)
    if (top_k < V) | (top_p < 1):
        s = tl.load(rows_ptr + r)
        row_ptr = logits_ptr + s * V
        top = tl.load(row_ptr + tl.load(ids_ptr + s)).to(tl.float32)
        at = split * BLOCK + tl.arange(0, BLOCK)
        keys = keys_of(row_ptr, at, V, top, tl.load(temperatures + r))
        if FIRST:
            least, most, low, shift = 0, _INFINITE, _LOWEST, _SHIFT
        else:
            least, most = tl.load(ranges + r * 4).to(tl.int32), tl.load(ranges + r * 4 + 1).to(tl.int32)
            low, shift = least, tl.where((most - least) >> _SHIFT == 0, _SHIFT - 3, 27)
        inside = (keys >= least) & (keys <= most) & (at < V)
        parts = sums + (r * SPLITS + split) * WAYS
        if tl.max(inside.to(tl.int32), 0) > 0:
            if top_k < V:
                amounts = inside.to(tl.int64)
            else:
                amounts = tl.where(inside, weigh(keys, LIBRARY), 0)
            which = tl.minimum(tl.maximum((keys - low) >> shift, 0), WAYS - 1)
            for w in tl.static_range(WAYS):
                tl.store(parts + w, tl.sum(tl.where(which == w, amounts, 0), 0))
        else:
            tl.store(parts + tl.arange(0, WAYS), tl.zeros([WAYS], tl.int64))
        tl.debug_barrier()
        if tl.atomic_add(counters + r, 1, sem="acq_rel") == SPLITS - 1:
            i, way = tl.arange(0, SPLITS_PAD), tl.arange(0, WAYS).to(tl.int64)
            places = (r * SPLITS + i[:, None]) * WAYS + way[None, :]
            amount = tl.sum(tl.load(sums + places, mask=i[:, None] < SPLITS, other=0, cache_modifier=".cg"), 0)
            if FIRST:
                below, need = top_k * 0, tl.where(top_k < V, top_k, _enough(top_p, tl.sum(amount, 0)))
            else:
                below, need = tl.load(ranges + r * 4 + 2), tl.load(ranges + r * 4 + 3)
            chosen = tl.min(tl.where(below + tl.cumsum(amount, 0) >= need, way, WAYS - 1), 0)
            start = low + (chosen << shift)
            end = tl.where(chosen < WAYS - 1, low + ((chosen + 1) << shift) - 1, most)
            tl.store(ranges + r * 4, tl.where(chosen > 0, start, least))
            tl.store(ranges + r * 4 + 1, tl.minimum(end, most))
            tl.store(ranges + r * 4 + 2, below + tl.sum(tl.where(way < chosen, amount, 0), 0))
            tl.store(ranges + r * 4 + 3, need)
            tl.store(counters + r, 0)


@triton.jit
def _narrow(list_ptr, count, low, high, below, outside, need, by_count, CHUNK: tl.constexpr, LIBRARY: tl.constexpr):
    """(the key from `low` to `high` at which the amounts reach `need`, the amount of all below that key).

    `below`: the amount of all keys below `low`, `outside`: of those among them that the list does not hold.
    """
    way = tl.arange(0, WAYS)
    while low < high:
        step = (high - low) // WAYS + 1
        bounds = tl.minimum(low + (way + 1) * step - 1, high).to(tl.int32)
        found = tl.zeros([WAYS, CHUNK], tl.int64)
        for start in range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            keys = tl.load(list_ptr + at, mask=at < count, other=0x7FFFFFFF, cache_modifier=".cg")
            amounts = tl.where(by_count, 1, weigh(keys, LIBRARY))
            found += tl.where(keys[None, :] <= bounds[:, None], amounts[None, :], 0)
        upto = outside + tl.sum(found, 1)
        chosen = tl.minimum(tl.sum((upto < need).to(tl.int32), 0), WAYS - 1)
        below = tl.where(chosen > 0, tl.sum(tl.where(way == chosen - 1, upto, 0), 0), below)
        low += chosen * step
        high = tl.minimum(low + step - 1, high)
    return low, below


@triton.jit
def _weight_below(list_ptr, count, edge, CHUNK: tl.constexpr, LIBRARY: tl.constexpr):
    """The weight of all keys of the list below `edge`."""
    found = tl.zeros([CHUNK], tl.int64)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        keys = tl.load(list_ptr + at, mask=at < count, other=0x7FFFFFFF, cache_modifier=".cg")
        found += tl.where(keys < edge, weigh(keys, LIBRARY), 0)
    return tl.sum(found, 0)


@triton.jit
def _fine(
    logits_ptr, ids_ptr, rows_ptr, temperatures, top_ks, top_ps, ranges, lists, lengths, edges, num_kept, counters, V,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, LIBRARY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and BLOCK of its tokens: lists those in the range. The last program of a row finds the edge among them."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    r, split = tl.program_id(0), tl.program_id(1)
    top_k, top_p = tl.load(top_ks + r), tl.load(top_ps + r)
    if (top_k < V) | (top_p < 1):
        low, high = tl.load(ranges + r * 4), tl.load(ranges + r * 4 + 1)
        below, need = tl.load(ranges + r * 4 + 2), tl.load(ranges + r * 4 + 3)
        by_count = top_k < V
        # After top-k, top-p goes on with all that this keeps.
        both = by_count & (top_p < 1)
        least, outside = tl.where(both, 0, low), tl.where(both, 0, below)
        s = tl.load(rows_ptr + r)
        row_ptr = logits_ptr + s * V
        top = tl.load(row_ptr + tl.load(ids_ptr + s)).to(tl.float32)
        at = split * BLOCK + tl.arange(0, BLOCK)
        keys = keys_of(row_ptr, at, V, top, tl.load(temperatures + r))
        listed = (keys >= least) & (keys <= high) & (at < V)
        list_ptr = lists + r.to(tl.int64) * V
        num_listed = tl.sum(listed.to(tl.int32), 0)
        if num_listed > 0:
            first = tl.atomic_add(lengths + r, num_listed, sem="relaxed")
            tl.store(list_ptr + first + tl.cumsum(listed.to(tl.int32), 0) - 1, keys, mask=listed)
        tl.debug_barrier()
        if tl.atomic_add(counters + r, 1, sem="acq_rel") == SPLITS - 1:
            count = tl.load(lengths + r, cache_modifier=".cg")
            edge, below = _narrow(list_ptr, count, low, high, below, outside, need, by_count, CHUNK, LIBRARY)
            kept = need - below
            if top_p < 1:
                if by_count:
                    total = _weight_below(list_ptr, count, edge, CHUNK, LIBRARY)
                    need = _enough(top_p, total + kept * weigh(edge.to(tl.int32), LIBRARY))
                    edge, below = _narrow(
                        list_ptr, count, 0 * low, edge, 0 * low, 0 * low, need, ~by_count, CHUNK, LIBRARY
                    )
                weight = tl.maximum(weigh(edge.to(tl.int32), LIBRARY), 1)  # 0 where the logits are not finite
                kept = (need - below + weight - 1) // weight
            tl.store(edges + r, edge.to(tl.int32))
            tl.store(num_kept + r, kept.to(tl.int32))
            tl.store(lengths + r, 0)
            tl.store(counters + r, 0)
    elif split == 0:
        tl.store(edges + r, _INFINITE)
        tl.store(num_kept + r, 0)


_coarse_kernel, _fine_kernel = Kernel(_coarse), Kernel(_fine)


def find_edges(
    logits: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(edges, how many tokens at each edge are kept), both int32 [R], of the rows `rows` of `logits` [S, V].

    `ids` [S]: the likeliest tokens. Of the R rows: `temperatures` float32, `top_ks` int64 from 1 to V, and `top_ps`
    float64, at most 1, on what top-k leaves.
    """
    count, vocab, device = len(rows), logits.shape[-1], logits.device
    splits = cdiv(vocab, BLOCK)
    grid = count, splits
    sums = torch.empty((count, splits, WAYS.value), dtype=torch.int64, device=device)
    ranges = torch.empty((count, 4), dtype=torch.int64, device=device)
    lists = torch.empty((count, vocab), dtype=torch.int32, device=device)
    edges, num_kept = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    options = logits.contiguous(), ids, rows, temperatures, top_ks, top_ps
    zeros = counters(2 * count, device)
    for first in (True, False):
        _coarse_kernel(
            grid, (*options, sums, ranges, zeros, vocab),
            {"FIRST": first, "BLOCK": BLOCK, "SPLITS": splits, "SPLITS_PAD": power_of_2(splits), "LIBRARY": LIBRARY},
            warps=8,
        )  # fmt: skip
    _fine_kernel(
        grid, (*options, ranges, lists, zeros[len(zeros) // 2 :], edges, num_kept, zeros, vocab),
        {"BLOCK": BLOCK, "CHUNK": CHUNK, "SPLITS": splits, "LIBRARY": LIBRARY},
        warps=8,
    )  # fmt: skip
    return edges, num_kept
