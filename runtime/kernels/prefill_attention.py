"""Attention of many new tokens a sequence over the blocked cache, causal, in tiles (FlashAttention-2, Dao 2023).

Takes what torch's varlen attention does not on every version: blocked keys and values, a window with any start, a
cap, sinks, any head dimension, float32. The new keys must be in the cache already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_attention import Softmax, scores_to_exponents
from .launch import (
    Kernel,
    cdiv,
    dot,
    index_type,
    power_of_2,
    precision,
    start_dependents,
    takes_large_tiles,
    wait_for_inputs,
)


@triton.jit
def _attend(
    q, k_cache, v_cache, table, head, low, high, last_seen, first_seen, highest, total, acc, scale, cap,
    KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    INDEX: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [low, high); query i sees [first_seen[i], last_seen[i]], checked when MASKED."""
    d = tl.arange(0, D_PAD)
    dtype = k_cache.dtype.element_ty
    ahead = low + tl.arange(0, BLOCK)
    next_block = tl.load(table + ahead // SIZE, mask=ahead < high, other=0)
    for first in range(low, high, BLOCK):
        at = first + tl.arange(0, BLOCK)
        # Looked up one turn ahead, so that loads of keys wait for no other load of their own turn.
        block = next_block
        next_block = tl.load(table + (at + BLOCK) // SIZE, mask=at + BLOCK < high, other=0)
        slots = ((block.to(INDEX) * SIZE + at % SIZE) * KV + head) * D
        if D == D_PAD:
            k = tl.load(k_cache + slots[None, :] + d[:, None])
            v = tl.load(v_cache + slots[:, None] + d[None, :])
        else:
            k = tl.load(k_cache + slots[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
            v = tl.load(v_cache + slots[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        scores = dot(q, k, tl.zeros([q.shape[0], BLOCK], tl.float32), PRECISION)
        exponents = scores_to_exponents(scores, scale, cap, CAPPED)
        if MASKED:
            seen = at[None, :] <= last_seen[:, None]
            if WINDOWED:
                seen = seen & (at[None, :] >= first_seen[:, None])
            exponents = tl.where(seen, exponents, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(exponents, 1))
        # A query may have seen nothing yet: subtract 0 instead of -inf.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
        weights = tl.exp2(exponents - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = dot(weights.to(dtype), v, acc * shrink[:, None], PRECISION)
        highest = new_highest
    return highest, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "starts", "rows", "kv_lens"],  # parts of larger tensors, at any place
)
def _prefill_attention(
    q_ptr, k_cache, v_cache, tables, starts, rows, kv_lens, out_ptr, sinks, table_stride, scale, cap, window,
    KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, INDEX: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one sequence and one query head."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    s, query_head = tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, so that they do not end last
    start, stop = tl.load(starts + s), tl.load(starts + s + 1)
    if tile * QUERIES >= stop - start:
        return
    d = tl.arange(0, D_PAD)
    head = query_head // G
    at = start + tile * QUERIES + tl.arange(0, QUERIES)
    q_at = at.to(tl.int64)[:, None] * (KV * G * D) + query_head * D + d[None, :]
    mask = (at < stop)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
    kv_len = tl.load(kv_lens + s)
    table = tables + tl.load(rows + s).to(tl.int64) * table_stride
    offset = kv_len - (stop - start) - start  # token index -> position
    last_seen = tl.minimum(at, stop - 1) + offset
    first_seen = tl.maximum(last_seen + 1 - window, 0) if WINDOWED else last_seen * 0
    first_query = start + tile * QUERIES + offset
    high = tl.minimum(first_query + QUERIES, kv_len)
    # Keys [low, clear_low) and [clear_high, high) need a mask; a multiple of BLOCK apart from low.
    low = tl.maximum(first_query + 1 - window, 0) // BLOCK * BLOCK if WINDOWED else 0
    clear_low = tl.minimum(tl.cdiv(tl.maximum(high - window, 0), BLOCK) * BLOCK, high) if WINDOWED else 0
    clear_high = tl.maximum((first_query + 1) // BLOCK * BLOCK, clear_low)
    if SINKS:
        sink = tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634
        highest, total = tl.zeros([QUERIES], tl.float32) + sink, tl.full([QUERIES], 1.0, tl.float32)
    else:
        highest, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, D_PAD], tl.float32)
    if WINDOWED:
        highest, total, acc = _attend(
            q, k_cache, v_cache, table, head, low, clear_low, last_seen, first_seen, highest, total, acc, scale, cap,
            KV, D, D_PAD, SIZE, BLOCK, INDEX, True, WINDOWED, CAPPED, PRECISION)  # fmt: skip
    highest, total, acc = _attend(
        q, k_cache, v_cache, table, head, clear_low, clear_high, last_seen, first_seen, highest, total, acc, scale, cap,
        KV, D, D_PAD, SIZE, BLOCK, INDEX, False, WINDOWED, CAPPED, PRECISION)  # fmt: skip
    highest, total, acc = _attend(
        q, k_cache, v_cache, table, head, clear_high, high, last_seen, first_seen, highest, total, acc, scale, cap,
        KV, D, D_PAD, SIZE, BLOCK, INDEX, True, WINDOWED, CAPPED, PRECISION)  # fmt: skip
    tl.store(out_ptr + q_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


_kernel = Kernel(_prefill_attention)


def choose_tiling(wide: int, itemsize: int, large: bool) -> tuple[int, int, int, int]:
    """(queries and keys at a time, warps, pipeline stages) for heads of `wide` padded dimensions."""
    if itemsize == 4 or wide > 256:
        return 32, 16, 4, 2
    return ((128, 128, 8, 2) if large else (64, 64, 4, 2)) if wide <= 128 else (64, 32, 4, 2)


def prefill_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    softmax: Softmax,
    *,
    tiling: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """q [T, kv*G, D], rotated, sequence s being tokens [starts[s], starts[s + 1]) -> [T, kv*G*D].

    `cache`: keys and values, each [B, S, kv, D], the new ones included. int32: `rows` [S], each sequence's row in
    `table` [R, blocks]; `starts` [S + 1]; `kv_lens` [S], tokens in the cache. `longest`: tokens of the longest one.
    `tiling`: queries and keys at a time, warps, pipeline stages.
    """
    k_cache, v_cache = cache
    size, kv, dim = k_cache.shape[1:]
    q = q.contiguous()
    heads, wide = q.shape[1], power_of_2(dim)
    out = torch.empty_like(q)
    queries, block, warps, stages = tiling or choose_tiling(wide, q.element_size(), takes_large_tiles(q.device))
    _kernel(
        (cdiv(longest, queries), heads, rows.shape[0]),
        (
            q, k_cache, v_cache, table, starts, rows, kv_lens, out, q if softmax.sinks is None else softmax.sinks,
            table.stride(0), softmax.scale, softmax.cap, softmax.window,
        ),
        {
            "KV": kv, "G": heads // kv, "D": dim, "D_PAD": wide, "SIZE": size, "QUERIES": queries, "BLOCK": block,
            "INDEX": index_type(k_cache),
            "WINDOWED": softmax.window > 0, "CAPPED": softmax.cap > 0, "SINKS": softmax.sinks is not None,
            "PRECISION": precision(q),
        },
        warps=warps,
        stages=stages,
    )  # fmt: skip
    return out.flatten(1)
