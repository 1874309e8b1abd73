"""Draws one token a sequence by chance, in one launch: what `runtime/sampling.py` does with many torch operations.

Weights are whole numbers, so their sums are exact: no draw depends on how a row is split or on the rest of the batch.
They equal torch's on the same device bit for bit: the same subtraction, a division that is rounded alike, and the exp()
that torch itself calls.

Shapes: S sequences of the batch, R of them drawn by chance, V vocabulary (padding included).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from . import INTERPRETED
from .argmax import counters
from .launch import Kernel, cdiv, power_of_2, start_dependents, wait_for_inputs

BLOCK = 2048
LIBRARY = not INTERPRETED
"""Whether exp() is the library's; the interpreter has numpy's alone."""


@triton.jit
def keys_of(row_ptr, at, V, top, temperature):
    """int32: how far the tokens `at` lie below the likeliest, at their temperature: a float's bits, in its order."""
    x = tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
    return tl.abs(tl.div_rn(x - top, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def weigh(keys, LIBRARY: tl.constexpr):
    """int64: the likelihood in units of 2**-40 of the likeliest token's, as `sampling.weigh` has it."""
    scaled = -keys.to(tl.float32, bitcast=True)
    if LIBRARY:
        likelihood = libdevice.exp(scaled)
    else:
        likelihood = tl.exp(scaled)
    return (likelihood * 1099511627776.0).to(tl.int64)  # pyright: ignore[reportOptionalOperand]


@triton.jit
def _weights_of(row_ptr, at, V, top, temperature, min_weight, LIBRARY: tl.constexpr):
    """(keys, weights) of the tokens `at`; those that are too unlikely weigh nothing."""
    keys = keys_of(row_ptr, at, V, top, temperature)
    weights = weigh(keys, LIBRARY)
    return keys, tl.where((weights >= min_weight) & (at < V), weights, 0)


@triton.jit
def _draw(
    logits_ptr, ids_ptr, rows_ptr, randoms_ptr, temperatures, min_weights, edges, num_kept, sums, equals, counters, V,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    LIBRARY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and BLOCK of its tokens: their sum. The last program of a row to finish finds the token.

    FILTERED: tokens whose key is below the row's edge are drawn, and the first `num_kept` of those that equal it.
    """
    start_dependents(PDL)
    wait_for_inputs(PDL)
    r, split = tl.program_id(0), tl.program_id(1)
    s = tl.load(rows_ptr + r)
    row_ptr = logits_ptr + s * V
    top = tl.load(row_ptr + tl.load(ids_ptr + s)).to(tl.float32)
    temperature, min_weight = tl.load(temperatures + r), tl.load(min_weights + r)
    at = split * BLOCK + tl.arange(0, BLOCK)
    keys, weights = _weights_of(row_ptr, at, V, top, temperature, min_weight, LIBRARY)
    if FILTERED:
        edge = tl.load(edges + r)
        weights = tl.where(keys < edge, weights, 0)
        tl.store(equals + r * SPLITS + split, tl.sum(((keys == edge) & (at < V)).to(tl.int32), 0))
    tl.store(sums + r * SPLITS + split, tl.sum(weights, 0))
    tl.debug_barrier()
    if tl.atomic_add(counters + r, 1, sem="acq_rel") == SPLITS - 1:
        i = tl.arange(0, SPLITS_PAD)
        parts = tl.load(sums + r * SPLITS + i, mask=i < SPLITS, other=0, cache_modifier=".cg")
        kept = tl.zeros_like(i)
        if FILTERED:
            edge = tl.load(edges + r)
            equal = tl.load(equals + r * SPLITS + i, mask=i < SPLITS, other=0, cache_modifier=".cg")
            weight = weigh(edge, LIBRARY)
            kept = tl.load(num_kept + r) - (tl.cumsum(equal, 0) - equal)
            kept = tl.minimum(tl.maximum(kept, 0), equal)
            parts += kept * tl.where(weight >= min_weight, weight, 0)
        total = tl.sum(parts, 0)
        target = tl.minimum((tl.load(randoms_ptr + r) * total.to(tl.float64)).to(tl.int64), total - 1)
        # The first place where the running sum exceeds the target: among the blocks, then in one of them.
        block = tl.min(tl.where(tl.cumsum(parts, 0) > target, i, SPLITS - 1), 0)
        target -= tl.sum(tl.where(i < block, parts, 0), 0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        keys, weights = _weights_of(row_ptr, at, V, top, temperature, min_weight, LIBRARY)
        if FILTERED:
            edge = tl.load(edges + r)
            place = tl.cumsum((keys == edge).to(tl.int32), 0)
            first = place <= tl.sum(tl.where(i == block, kept, 0), 0)
            weights = tl.where((keys < edge) | ((keys == edge) & first), weights, 0)
        token = tl.min(tl.where(tl.cumsum(weights, 0) > target, at, V - 1), 0)
        tl.store(ids_ptr + s, tl.minimum(token, V - 1))
        tl.store(counters + r, 0)


_kernel = Kernel(_draw)


def draw(
    logits: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor,
    randoms: torch.Tensor,
    temperatures: torch.Tensor,
    min_weights: torch.Tensor,
    edges: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Replace `ids` [S] of the likeliest tokens of `logits` [S, V] by drawn ones in the rows `rows`, both int64.

    Of these R rows: `randoms` float64 in [0, 1), `temperatures` float32, and `min_weights` int64, in the units of
    `weigh`, below which a token is never drawn; `edges` as `edges.find_edges` returns them. A row with a NaN or
    nothing finite gets any id below V.
    """
    count, vocab = len(rows), logits.shape[-1]
    splits = cdiv(vocab, BLOCK)
    sums = torch.empty((count, splits), dtype=torch.int64, device=logits.device)
    equals = torch.empty((count, splits), dtype=torch.int32, device=logits.device) if edges else sums
    _kernel(
        (count, splits),
        (
            logits.contiguous(), ids, rows, randoms, temperatures, min_weights, *(edges or (sums, sums)), sums, equals,
            counters(count, logits.device), vocab,
        ),
        {
            "FILTERED": edges is not None, "BLOCK": BLOCK, "SPLITS": splits, "SPLITS_PAD": power_of_2(splits),
            "LIBRARY": LIBRARY,
        },
        warps=8,
    )  # fmt: skip
