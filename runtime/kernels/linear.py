"""x W^T for few tokens, where the time is that of reading W once: beats cuBLAS on small matrices.

Shapes: T tokens, N output rows of W, K columns. One token: dot products of whole rows, no tensor cores. Several: the
tensor cores take W's rows as one operand and the tokens, filled up to 16, as the other.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import INTERPRETED
from .activation import gated, gated_activation
from .launch import (
    LATE,
    Kernel,
    cdiv,
    dot,
    power_of_2,
    precision,
    start_dependents,
    start_dependents_late,
    takes_large_tiles,
    wait_for_inputs,
)
from .packets import DATA_BYTES, Workspace, send_products
from .tilings import MOST_TOKENS, Tiling, choose


@triton.jit
def _row_products(
    x_ptr, w_ptr, bias_ptr, y_ptr, buffers, counts, N, rank, most,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, WORLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: y[n] = sum_k x[k] W[n, k]. GATED: W holds N gate rows, then N up rows; y = act(gate) * up.

    With a WORLD of ranks y is this one's part of a sum, and sent to all of them; y_ptr has only its dtype.
    """
    start_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    dtype = y_ptr.dtype.element_ty
    inside = rows < N
    w_at = w_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    mask = inside[:, None] & (columns < K)[None, :]
    # The first columns are on their way before the input is there.
    w = tl.load(w_at, mask=mask, other=0.0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(w_at + N.to(tl.int64) * K, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    total = w.to(tl.float32) * x
    total_up = u.to(tl.float32) * x if GATED else total
    for start in tl.static_range(BLOCK, K, BLOCK):
        mask = inside[:, None] & (start + columns < K)[None, :]
        w = tl.load(w_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)[None, :]
        total += w.to(tl.float32) * x
        if GATED:
            u = tl.load(w_at + N.to(tl.int64) * K + start, mask=mask, other=0.0, eviction_policy="evict_first")
            total_up += u.to(tl.float32) * x
    start_dependents_late(PDL)
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(total_up, 1)
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + rows, mask=inside, other=0.0).to(tl.float32)
        y = gated(y, up, ACT, dtype)
    _store_or_send(y[:, None], tl.program_id(0), tl.arange(0, 1), tl.arange(0, 1) == 0, y_ptr, N, buffers, counts, rank,
                   most, ROWS, WORLD)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _tile_products(
    x_ptr, w_ptr, bias_ptr, y_ptr, partial, counters, buffers, counts, T, N, rank, most,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, WORLD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to TOKENS tokens: y[t, n] = sum_k x[t, k] W[n, k], ROWS rows a program. GATED and WORLD as above.

    With SPLITS programs a row the last one to finish adds up their parts, in their order.
    """
    start_dependents(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK)
    inside, present = rows < N, tokens < T
    share: tl.constexpr = (K + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, K)
    w_row = w_ptr + tl.where(inside, rows, 0).to(tl.int64) * K
    wait_for_inputs(PDL)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    x_at = x_ptr + tokens[None, :] * K + columns[:, None]
    w_at = w_row[:, None] + columns[None, :]
    for start in range(begin, end, BLOCK):
        within = start + columns < K
        x = tl.load(x_at + start, mask=present[None, :] & within[:, None], other=0.0)
        w = tl.load(w_at + start, mask=within[None, :], other=0.0, eviction_policy="evict_first")
        total = dot(w, x, total, PRECISION)
        if GATED:
            u = tl.load(
                w_at + N.to(tl.int64) * K + start, mask=within[None, :], other=0.0, eviction_policy="evict_first"
            )
            up = dot(u, x, up, PRECISION)
    start_dependents_late(PDL)
    if SPLITS == 1:
        y = _finished(total, up, bias_ptr, y_ptr, rows, inside, N, HAS_BIAS, GATED, ACT)
        _store_or_send(y, tile, tokens, present, y_ptr, N, buffers, counts, rank, most, ROWS, WORLD)
    else:
        size: tl.constexpr = ROWS * TOKENS * (2 if GATED else 1)
        at = tl.arange(0, ROWS)[:, None] * TOKENS + tokens[None, :]
        parts = partial + tile.to(tl.int64) * (SPLITS * size) + at
        tl.store(parts + split * size, total)
        if GATED:
            tl.store(parts + split * size + ROWS * TOKENS, up)
        tl.debug_barrier()  # every thread's part is written before one of them counts this program as done
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            up = tl.zeros([ROWS, TOKENS], tl.float32)
            for i in tl.static_range(SPLITS):
                total += tl.load(parts + i * size, cache_modifier=".cg")
                if GATED:
                    up += tl.load(parts + i * size + ROWS * TOKENS, cache_modifier=".cg")
            y = _finished(total, up, bias_ptr, y_ptr, rows, inside, N, HAS_BIAS, GATED, ACT)
            _store_or_send(y, tile, tokens, present, y_ptr, N, buffers, counts, rank, most, ROWS, WORLD)
            tl.store(counters + tile, 0)


@triton.jit
def _finished(
    total, up, bias_ptr, y_ptr, rows, inside, N, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr
):
    """Bias and activation of [ROWS, TOKENS] sums."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        total = gated(total, up, ACT, y_ptr.dtype.element_ty)
    return total


@triton.jit
def _store_or_send(
    y, tile, tokens, present, y_ptr, N, buffers, counts, rank, most, ROWS: tl.constexpr, WORLD: tl.constexpr
):
    """[ROWS, TOKENS] of the rows from tile * ROWS on: into y [T, N], or as a part of a sum to all ranks."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if WORLD == 0:
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = present[None, :] & (rows < N)[:, None]
        tl.store(y_ptr + tokens[None, :] * N + rows[:, None], y.to(dtype), mask=inside)
    else:
        halves: tl.constexpr = 32 // y_ptr.dtype.element_ty.primitive_bitwidth
        pair = tile * (ROWS // halves) + tl.arange(0, ROWS // halves)
        inside = present[None, :] & (pair * halves < N)[:, None]
        send_products(y, pair, tokens, inside, N, buffers, counts, rank, most, ROWS, WORLD, halves, dtype)


# Late: blocks that wait for these kernels' results would take the place of blocks that still have weights to read.
_row_kernel, _tile_kernel = Kernel(_row_products, LATE), Kernel(_tile_products, LATE)


@lru_cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that every launch leaves as zeros: one a tile of rows."""
    with torch.inference_mode(False):
        return torch.zeros(1 << 14, dtype=torch.int32, device=device)


def row_products(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling, activation: str = "",
    to: Workspace | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [1, K] times weight [N, K] -> [1, N]; with an activation, weight [2 N, K] is gate over up -> [1, N]

    What is sent `to` a group of ranks is not returned.
    """
    size = weight.shape[0] // 2 if activation else weight.shape[0]
    y, group = _result(x, size, to)
    _row_kernel(
        (cdiv(size, tiling.rows),),
        (x, weight, weight if bias is None else bias, y, *group[:2], size, *group[2:]),
        {
            "K": weight.shape[1], "ROWS": tiling.rows, "BLOCK": tiling.columns,
            "HAS_BIAS": bias is not None, "GATED": bool(activation), "ACT": activation, "WORLD": to.size if to else 0,
        },
        warps=tiling.warps,
    )  # fmt: skip
    return y


def tile_products(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling, activation: str = "",
    to: Workspace | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, K] times weight [N, K] -> [T, N]; with an activation, weight [2 N, K] is gate over up -> [T, N]

    What is sent `to` a group of ranks is not returned.
    """
    size = weight.shape[0] // 2 if activation else weight.shape[0]
    tokens = x.shape[0]
    y, group = _result(x, size, to)
    padded, tiles = max(16, power_of_2(tokens)), cdiv(size, tiling.rows)
    partial = y
    if tiling.splits > 1:
        parts = tiles * tiling.rows * padded * tiling.splits * (2 if activation else 1)
        partial = torch.empty(parts, dtype=torch.float32, device=x.device)
    _tile_kernel(
        (tiles, tiling.splits),
        (x, weight, weight if bias is None else bias, y, partial, _counters(x.device), *group[:2], tokens, size, *group[2:]),
        {
            "K": weight.shape[1], "TOKENS": padded, "ROWS": tiling.rows, "BLOCK": tiling.columns,
            "SPLITS": tiling.splits, "HAS_BIAS": bias is not None, "GATED": bool(activation),
            "ACT": activation, "PRECISION": precision(x), "WORLD": to.size if to else 0,
        },
        warps=tiling.warps,
        stages=tiling.stages,
    )  # fmt: skip
    return y


def _result(x: torch.Tensor, size: int, to: Workspace | None) -> tuple[torch.Tensor, tuple]:
    """Where products of `size` rows go: a tensor [T, size], and what kernels need of a group of ranks."""
    if to is None:
        return x.new_empty((len(x), size)), (x, x, 0, 0)
    return x.new_empty((len(x), 0)), (to.buffers, to.counts, to.rank, to.most_packets)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = ""
) -> torch.Tensor:
    """x W^T + b [T, N], by the kernel that is fastest for this size; with an activation act(gate) * up [T, N/2]."""
    tiling = _own_tiling(x, weight, activation)
    if tiling is None:
        y = F.linear(x, weight, bias)
        return gated_activation(y, activation) if activation else y
    products = row_products if len(x) == 1 else tile_products
    return products(x.contiguous(), weight, bias, tiling, activation)


def send_linear(x: torch.Tensor, weight: torch.Tensor, to: Workspace) -> bool:
    """Send x W^T, [T, N], to all ranks of a group as this one's part of the next sum: the bits of `linear`.

    False where another product is faster, or a program does not make all that a packet has: two rows of numbers of 16
    bits. N is even there. `all_reduce_add_rms_norm` receives.
    """
    tiling = _own_tiling(x, weight, "")
    if tiling is None or tiling.rows * x.element_size() < DATA_BYTES:
        return False
    products = row_products if len(x) == 1 else tile_products
    products(x.contiguous(), weight, None, tiling, to=to)
    return True


def _own_tiling(x: torch.Tensor, weight: torch.Tensor, activation: str) -> Tiling | None:
    """How a kernel of ours makes this product; None where it does not."""
    tokens, (rows, columns) = len(x), weight.shape
    fits = tokens == 1 or (0 < tokens <= MOST_TOKENS and takes_large_tiles(x.device))
    if not fits or not ((columns % 8 == 0 and weight.is_contiguous()) or INTERPRETED):
        return None
    return choose(tokens, rows // 2 if activation else rows, columns, x.element_size(), bool(activation))
