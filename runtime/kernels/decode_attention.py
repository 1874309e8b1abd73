"""Attention of one new token a sequence over the blocked cache, keys split over programs (split-KV, flash-decoding).

A program takes one sequence, one kv head with its G queries, and one of the splits of the cached keys. The last
program of a head to finish adds up the splits, in their order, so the result does not depend on which one it was.
With `qkv` the program also norms and rotates its queries, and the last split the new key, which it writes to the
cache: the step needs no kernel of its own for that.

Where ranks share out the cache (runtime/context_batch.py), a rank finds what its part gives, and `merged` makes one
result of what all ranks have found.

Online softmax: Milakov and Gimelshein 2018; flash-decoding: Dao et al. 2023. Exponents are to base 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .activation import tanh
from .launch import (
    Kernel,
    dot,
    index_type,
    num_processors,
    power_of_2,
    precision,
    start_dependents,
    start_dependents_late,
    takes_large_tiles,
    wait_for_inputs,
)
from .rotary import HeadNorm, Rotation, load_rotated, norm_arguments, norm_flags

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Softmax:
    """What an attention layer does to its scores: scale, cap (0: none), window (0: none), and sink logits [kv*G]."""

    scale: float
    cap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class CachePart:
    """Of runs of S positions that `ranks` ranks take in turn, those that `rank` keeps."""

    rank: int
    ranks: int


WHOLE = CachePart(0, 1)


@triton.jit
def _kept_before(position, rank, RANKS: tl.constexpr, SIZE: tl.constexpr):
    """How many of the tokens before `position` a rank keeps: it does so without gaps."""
    beyond = position % (SIZE * RANKS) - rank * SIZE
    return position // (SIZE * RANKS) * SIZE + tl.minimum(tl.maximum(beyond, 0), SIZE)


@triton.jit
def scores_to_exponents(scores, scale, cap, CAPPED: tl.constexpr):
    """Raw dot products to exponents of two: scaled, and capped as cap * tanh(s / cap) (Gemma 2)."""
    if CAPPED:
        return cap * 1.4426950408889634 * tanh(scores * (scale / cap))
    return scores * (scale * 1.4426950408889634)


@triton.jit
def _over_kept_keys(
    q, k_cache, v_cache, table, head, begin, end, scale, cap,
    KV: tl.constexpr, G_DOT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, INDEX: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(highest exponent, sum of exponentials, weighted sum of values) of cached keys [begin, end): online softmax."""
    d = tl.arange(0, D_PAD)
    dtype = k_cache.dtype.element_ty
    highest = tl.full([G_DOT], float("-inf"), tl.float32)
    total = tl.zeros([G_DOT], tl.float32)
    acc = tl.zeros([G_DOT, D_PAD], tl.float32)
    ahead = begin + tl.arange(0, BLOCK)
    next_block = tl.load(table + ahead // SIZE, mask=ahead < end, other=0)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        seen = at < end
        # Looked up one turn ahead, so that loads of keys wait for no other load of their own turn.
        block = next_block
        next_block = tl.load(table + (at + BLOCK) // SIZE, mask=at + BLOCK < end, other=0)
        slots = ((block.to(INDEX) * SIZE + at % SIZE) * KV + head) * D
        mask = seen[:, None] & (d < D)[None, :]
        k = tl.load(k_cache + slots[:, None] + d[None, :], mask=mask, other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros([G_DOT, BLOCK], tl.float32), PRECISION)
        exponents = scores_to_exponents(scores, scale, cap, CAPPED)
        exponents = tl.where(seen[None, :], exponents, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(exponents, 1))
        weights = tl.exp2(exponents - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        v = tl.load(v_cache + slots[:, None] + d[None, :], mask=mask, other=0.0)
        acc = dot(weights.to(dtype), v, acc * shrink[:, None], PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        highest = new_highest
    return highest, total, acc


@triton.jit
def _with_new_key(
    q, start, k_cache, v_cache, table, angles, weight, eps, position, head, highest, total, acc, scale, cap,
    KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr,
    ROT: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEAD_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write the new token's key, normed and rotated, and value to the cache, and take them into what was found."""
    d, one = tl.arange(0, D_PAD), tl.arange(0, 1)
    dtype = k_cache.dtype.element_ty
    k = load_rotated(start + (KV * G + head) * D + one, one == 0, angles, weight, eps, D, D_PAD, ROT,
                     INTERLEAVED, HEAD_NORM, ONE_PLUS, CAST_FIRST)  # fmt: skip
    v = tl.load(start + (KV * G + KV + head) * D + d, mask=d < D, other=0.0)
    block = tl.load(table + position // (SIZE * RANKS))
    slot = ((block.to(tl.int64) * SIZE + position % SIZE) * KV + head) * D
    tl.store(k_cache + slot + one[:, None] + d[None, :], k.to(dtype), mask=(d < D)[None, :])
    tl.store(v_cache + slot + d, v.to(dtype), mask=d < D)
    exponent = scores_to_exponents(tl.sum(q * k, 1), scale, cap, CAPPED)
    new_highest = tl.maximum(highest, exponent)
    weight = tl.exp2(exponent - new_highest)
    shrink = tl.exp2(highest - new_highest)
    acc = acc * shrink[:, None] + weight[:, None] * v.to(tl.float32)[None, :]
    return new_highest, total * shrink + weight, acc


@triton.jit(
    do_not_specialize=["table_stride", "window", "rank"],
    do_not_specialize_on_alignment=["tables", "rows", "positions"],  # parts of larger tensors, at any place
)
def _decode_attention(
    q_ptr, k_cache, v_cache, tables, rows, positions, out_ptr, partial, stats, counters,
    cos_sin, q_weight, k_weight, q_eps, k_eps, sinks, q_stride, table_stride, scale, cap, window, rank,
    KV: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, G_DOT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, INDEX: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    RANKS: tl.constexpr, FUSED: tl.constexpr, ROT: tl.constexpr, INTERLEAVED: tl.constexpr, BY_TOKEN: tl.constexpr,
    HEAD_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_dependents(PDL)
    wait_for_inputs(PDL)
    s, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, g = tl.arange(0, D_PAD), tl.arange(0, G_DOT)
    dtype = k_cache.dtype.element_ty
    position = tl.load(positions + s)
    table = tables + tl.load(rows + s).to(tl.int64) * table_stride
    start = q_ptr + s.to(tl.int64) * q_stride
    heads = head * G + g
    angles = cos_sin + (s if BY_TOKEN else position).to(tl.int64) * ROT
    if FUSED:
        q = load_rotated(start + heads * D, g < G, angles, q_weight, q_eps, D, D_PAD, ROT, INTERLEAVED,
                         HEAD_NORM, ONE_PLUS, CAST_FIRST)  # fmt: skip
    else:
        q_mask = (g < G)[:, None] & (d < D)[None, :]
        q = tl.load(start + heads[:, None] * D + d[None, :], mask=q_mask, other=0.0).to(tl.float32)

    # Cached keys [low, high), without the new one when it is still to be written; this split's part [begin, end).
    high = position + (0 if FUSED else 1)
    low = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    if RANKS > 1:
        high = _kept_before(high, rank, RANKS, SIZE)
        low = _kept_before(low, rank, RANKS, SIZE) if WINDOWED else 0
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), SPLITS), 16) * 16
    begin = low + split * share
    end = tl.minimum(begin + share, high)
    highest, total, acc = _over_kept_keys(
        q.to(dtype), k_cache, v_cache, table, head, begin, end, scale, cap,
        KV, G_DOT, D, D_PAD, SIZE, BLOCK, INDEX, CAPPED, PRECISION)  # fmt: skip

    if FUSED:
        new_here = split == SPLITS - 1
        if RANKS > 1:
            new_here = new_here & (position // SIZE % RANKS == rank)
        if new_here:
            highest, total, acc = _with_new_key(
                q, start, k_cache, v_cache, table, angles, k_weight, k_eps, position, head, highest, total, acc, scale, cap,
                KV, G, D, D_PAD, SIZE, RANKS, ROT, INTERLEAVED, HEAD_NORM, ONE_PLUS, CAST_FIRST, CAPPED)  # fmt: skip

    start_dependents_late(PDL)
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + heads, mask=g < G, other=0.0).to(tl.float32) * 1.4426950408889634
            new_highest = tl.maximum(highest, sink)
            acc = acc * tl.exp2(highest - new_highest)[:, None]
            total = total * tl.exp2(highest - new_highest) + tl.exp2(sink - new_highest)
            highest = new_highest
        _store_found(out_ptr, s, head, acc, highest, total, KV, G, G_DOT, D, D_PAD, RANKS)
    else:
        unit = s * KV + head
        part = (unit * SPLITS + split).to(tl.int64) * G_PAD
        keep = g < G_PAD
        tl.store(stats + (part + g) * 2, highest, mask=keep)
        tl.store(stats + (part + g) * 2 + 1, total, mask=keep)
        tl.store(partial + (part + g)[:, None] * D_PAD + d[None, :], acc, mask=keep[:, None] & (d >= 0)[None, :])
        tl.debug_barrier()  # every thread's part is written before one of them counts this program as done
        if tl.atomic_add(counters + unit, 1, sem="acq_rel") == SPLITS - 1:
            _add_up_splits(out_ptr, partial, stats, sinks, s, head, KV, G, G_PAD, D, D_PAD, SPLITS, SPLITS_PAD, RANKS,
                           SINKS)  # fmt: skip
            tl.store(counters + unit, 0)


@triton.jit
def _add_up_splits(
    out_ptr, partial, stats, sinks, s, head,
    KV: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, RANKS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one sequence and kv head; reads past L1, which may hold another layer's parts."""
    i, g, d = tl.arange(0, SPLITS_PAD), tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    part = (((s * KV + head) * SPLITS + i).to(tl.int64)[:, None]) * G_PAD + g[None, :]
    mask = (i < SPLITS)[:, None] & (g >= 0)[None, :]
    highest = tl.load(stats + part * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + part * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(highest, 0)
    if SINKS:
        sink = tl.load(sinks + head * G + g, mask=g < G, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    # A rank may keep nothing of a sequence: subtract 0 instead of -inf.
    base = tl.where(top == float("-inf"), 0.0, top) if RANKS > 1 else top
    weights = tl.exp2(highest - base[None, :])
    whole = tl.sum(weights * total, 0)
    if SINKS:
        whole += tl.exp2(sink - base)
    parts = tl.load(partial + part[:, :, None] * D_PAD + d[None, None, :], mask=mask[:, :, None] & (d >= 0)[None, None, :],
                    other=0.0, cache_modifier=".cg")  # fmt: skip
    _store_found(out_ptr, s, head, tl.sum(parts * weights[:, :, None], 0), top, whole, KV, G, G_PAD, D, D_PAD, RANKS)


@triton.jit
def _store_found(
    out_ptr, s, head, acc, highest, total,
    KV: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """acc / total; of several ranks also the logarithm of the sum of exponentials, behind it."""
    g, d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    width = D + 1 if RANKS > 1 else D
    at = out_ptr + s.to(tl.int64) * (KV * G * width) + (head * G + g) * width
    if RANKS > 1:
        tl.store(at + D, tl.where(total > 0.0, highest + tl.log2(total), float("-inf")), mask=g < G)
        total = tl.where(total > 0.0, total, 1.0)
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(at[:, None] + d[None, :], out, mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def _merge(
    found_ptr, out_ptr, heads, RANKS: tl.constexpr, RANKS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: what the ranks found, each weighted by its sum of exponentials."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    rank, d = tl.arange(0, RANKS_PAD), tl.arange(0, D_PAD)
    at = found_ptr + (rank * heads + tl.program_id(0)).to(tl.int64) * (D + 1)
    lse = tl.load(at + D, mask=rank < RANKS, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    found = tl.load(at[:, None] + d[None, :], mask=(rank < RANKS)[:, None] & (d < D)[None, :], other=0.0)
    out = tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


MAX_SPLITS = 32

_kernel = Kernel(_decode_attention)
_merge_kernel = Kernel(_merge)


def choose_tiling(units: int, wide: int, itemsize: int, processors: int) -> tuple[int, tuple[int, int, int]]:
    """(splits, (keys at a time, warps, pipeline stages)) for `units` sequences times kv heads, each `wide` dimensions.

    What won on an H200 (docs/performance.md): enough programs to fill it about twice, and the fewer there are, the
    deeper each one's pipeline. Splits are a power of two, since they are added up as one tensor.
    """
    wanted = max(1, 2 * processors // units)
    splits = min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))
    if itemsize > 2:
        return splits, ((64, 4, 2) if wide <= 128 else (16, 4, 2))
    if wide > 128:
        return splits, ((32, 4, 3) if wide <= 256 else (16, 4, 2))
    if units <= 16:
        return splits, (64, 4, 2)
    if units <= 128:
        return max(1, splits // 2), (128, 8, 3)
    return splits, ((64, 4, 4) if units <= 2 * processors else (64, 4, 2))


def decode_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    counters: torch.Tensor,
    softmax: Softmax,
    rotation: Rotation | None = None,
    norms: tuple[HeadNorm, HeadNorm] | None = None,
    *,
    part: CachePart = WHOLE,
    splits: int = 0,
    tiling: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """[S, kv*G*D]: attention of each sequence's newest token, at `positions` int32 [S], over the tokens up to it.

    `cache`: keys and values, each [B, S, kv, D]; `rows` int32 [S]: each sequence's row in `table` int32 [R, blocks].
    Without a rotation `q` is [S, kv*G, D], ready, and its key is in the cache. With one `q` is the projection
    [S, (kv*G + 2 kv) * D], and the new key and value are written too. `counters` int32, at least S*kv, all zero, and
    left so; it may be shared by all layers. `tiling`: keys at a time, warps, pipeline stages.

    Of a `part` that is not all: float32 [S, kv*G, D + 1], what this rank's keys give and the logarithm to base 2 of the
    sum of their exponentials, for `merged`. One rank only may have the sinks.
    """
    k_cache, v_cache = cache
    size, kv, dim = k_cache.shape[1:]
    fused, count = rotation is not None, q.shape[0]
    q = q if fused else q.reshape(count, -1)
    groups = q.shape[1] // dim // kv - (2 if fused else 0)
    pad, wide = power_of_2(groups), power_of_2(dim)
    if part.ranks > 1:
        out = q.new_empty((count, kv * groups, dim + 1), dtype=torch.float32)
    else:
        out = q.new_empty((count, kv * groups * dim))
    if splits == 0:
        splits, tiling = choose_tiling(count * kv, wide, q.element_size(), num_processors(q.device))
        tiling = tiling if takes_large_tiles(q.device) else (32, 4, 2)
    scratch = torch.empty(count * kv * splits * pad * (wide + 2), dtype=torch.float32, device=q.device)
    partial, stats = scratch, scratch[count * kv * splits * pad * wide :]
    cos_sin = rotation.cos_sin if rotation is not None else scratch
    block, warps, stages = tiling or (64, 4, 2)
    _kernel(
        (count, kv, splits),
        (
            q, k_cache, v_cache, table, rows, positions, out, partial, stats, counters,
            cos_sin, *norm_arguments(norms, cos_sin), cos_sin if softmax.sinks is None else softmax.sinks,
            q.stride(0), table.stride(0), softmax.scale, softmax.cap, softmax.window, part.rank,
        ),
        {
            "KV": kv, "G": groups, "G_PAD": pad, "G_DOT": max(16, pad), "D": dim, "D_PAD": wide, "SIZE": size,
            "BLOCK": block, "INDEX": index_type(k_cache), "SPLITS": splits, "SPLITS_PAD": power_of_2(splits),
            "RANKS": part.ranks, "FUSED": fused,
            "ROT": rotation.cos_sin.shape[1] if rotation is not None else 0,
            "INTERLEAVED": rotation is not None and rotation.interleaved,
            "BY_TOKEN": rotation is not None and rotation.by_token, **norm_flags(norms),
            "WINDOWED": softmax.window > 0, "CAPPED": softmax.cap > 0, "SINKS": softmax.sinks is not None,
            "PRECISION": precision(q),
        },
        warps=warps,
        stages=stages,
    )  # fmt: skip
    return out


def merged(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[S, heads*D] of what every rank has found, float32 [ranks, S, heads, D + 1]."""
    ranks, count, heads, width = found.shape
    out = torch.empty((count, heads * (width - 1)), dtype=dtype, device=found.device)
    sizes = {"RANKS": ranks, "RANKS_PAD": power_of_2(ranks), "D": width - 1, "D_PAD": power_of_2(width - 1)}
    _merge_kernel((count * heads,), (found, out, count * heads), sizes, warps=1)
    return out
