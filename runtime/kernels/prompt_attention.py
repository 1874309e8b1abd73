"""Attention of whole prompts: sequences of which nothing was cached before, so that all keys are the step's own.

The tiles are those of prefill_attention, but keys and values lie side by side, as projected and rotated, and no block
table stands between them and the kernel. On compute capability 9.0 and later the hardware fetches such a tile by
itself once it is described (a tensor descriptor), and warps are left to the softmax.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activation import tanh
from .decode_attention import LOG2_E, Softmax
from .launch import Kernel, cdiv, dot, precision, start_dependents, takes_large_tiles, wait_for_inputs


class PromptTiling(NamedTuple):
    """Queries and keys at a time, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


TILING = PromptTiling(64, 64, 4, 3)
"""What benchmarks/prefill_attention.py finds fastest in a step on an H200."""


@lru_cache
def prompt_tiling(device: torch.device, dtype: torch.dtype, dim: int) -> PromptTiling | None:
    """How whole prompts are attended to here, or None: like all others, by prefill_attention."""
    known = find_spec("triton.tools.tensor_descriptor") is not None and dtype in (torch.bfloat16, torch.float16)
    if not known or dim not in (64, 128) or device.type != "cuda" or not takes_large_tiles(device):
        return None
    return TILING if torch.cuda.get_device_capability(device) >= (9, 0) else None


@triton.jit
def _masked(scores, first, first_seen, last_seen, WINDOWED: tl.constexpr):
    at = first + tl.arange(0, scores.shape[1])
    seen = at[None, :] <= last_seen[:, None]
    if WINDOWED:
        seen = seen & (at[None, :] >= first_seen[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _turn(
    q, k_rows, v_rows, first, k_column, v_column, first_seen, last_seen, highest, total, acc, factor, cap,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [first, first + BLOCK); `highest` is in units of the scores, before `factor`."""
    scores = dot(q, k_rows.load([first, k_column]).T, tl.zeros([q.shape[0], BLOCK], tl.float32), PRECISION)
    values = v_rows.load([first, v_column])
    if CAPPED:
        scores = tanh(scores * cap)
    if MASKED:
        scores = _masked(scores, first, first_seen, last_seen, WINDOWED)
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A query may have seen nothing yet: subtract 0 instead of -inf.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if WINDOWED and MASKED else new_highest
    weights = tl.exp2(scores * factor - (base * factor)[:, None])
    shrink = tl.exp2((highest - base) * factor)
    total = total * shrink + tl.sum(weights, 1)
    acc = dot(weights.to(values.dtype), values, acc * shrink[:, None], PRECISION)
    return new_highest, total, acc


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["starts"])
def _prompt_attention(
    out_ptr, q_rows, k_rows, v_rows, starts, sinks, factor, cap, window,
    KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one sequence and one query head. Positions are those in the step, not in the sequence.

    All heads of all sequences' last tiles come first: they are the longest, and short ones fill what is left.
    """
    start_dependents(PDL)
    wait_for_inputs(PDL)
    query_head, s = tl.program_id(0), tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    start, stop = tl.load(starts + s), tl.load(starts + s + 1)
    head = query_head // G
    k_column, v_column = (KV * G + head) * D, (KV * G + KV + head) * D
    first_query = start + tile * QUERIES
    q = q_rows.load([first_query, query_head * D])
    at = first_query + tl.arange(0, QUERIES)
    last_seen = at
    first_seen = tl.maximum(at + 1 - window, start) if WINDOWED else at
    # Keys [low, clear_low) and [clear_high, high) need a mask; multiples of BLOCK from `start`, `high` apart. A tile
    # beyond the sequence's end has none.
    high = tl.minimum(first_query + QUERIES, stop)
    low, clear_low = start, start
    if WINDOWED:
        low = start + tl.maximum(first_query + 1 - window - start, 0) // BLOCK * BLOCK
        clear_low = tl.minimum(start + tl.cdiv(tl.maximum(high - window - start, 0), BLOCK) * BLOCK, high)
    clear_high = tl.minimum(tl.maximum(start + (first_query + 1 - start) // BLOCK * BLOCK, clear_low), high)
    if SINKS:
        sink = tl.load(sinks + query_head).to(tl.float32) * (1.4426950408889634 / factor)
        highest, total = tl.zeros([QUERIES], tl.float32) + sink, tl.full([QUERIES], 1.0, tl.float32)
    else:
        highest, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, D], tl.float32)
    if WINDOWED:
        for first in tl.range(low, clear_low, BLOCK):
            highest, total, acc = _turn(
                q, k_rows, v_rows, first, k_column, v_column, first_seen, last_seen, highest, total, acc, factor, cap,
                BLOCK, True, WINDOWED, CAPPED, PRECISION)  # fmt: skip
    for first in tl.range(clear_low, clear_high, BLOCK):
        highest, total, acc = _turn(
            q, k_rows, v_rows, first, k_column, v_column, first_seen, last_seen, highest, total, acc, factor, cap,
            BLOCK, False, WINDOWED, CAPPED, PRECISION)  # fmt: skip
    for first in tl.range(clear_high, high, BLOCK):
        highest, total, acc = _turn(
            q, k_rows, v_rows, first, k_column, v_column, first_seen, last_seen, highest, total, acc, factor, cap,
            BLOCK, True, WINDOWED, CAPPED, PRECISION)  # fmt: skip
    out_at = out_ptr + at.to(tl.int64)[:, None] * (KV * G * D) + query_head * D + tl.arange(0, D)[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(at < stop)[:, None])


_kernel = Kernel(_prompt_attention)


def prompt_attention(
    rotated: torch.Tensor,
    qkv: torch.Tensor,
    kv: int,
    starts: torch.Tensor,
    longest: int,
    softmax: Softmax,
    tiling: PromptTiling,
) -> torch.Tensor:
    """rotated [T, kv*G + kv, D], queries before keys, and qkv [T, (kv*G + 2 kv) * D], for its values -> [T, kv*G*D].

    `starts` int32 [S + 1]: sequence s is all of tokens [starts[s], starts[s + 1]). `longest`: tokens of the longest one.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # since Triton 3.4

    heads, dim = rotated.shape[1] - kv, rotated.shape[2]
    out = qkv.new_empty((qkv.shape[0], heads * dim))
    queries, keys = [tiling.queries, dim], [tiling.keys, dim]
    queries_and_keys = rotated.flatten(1)
    described = (
        TensorDescriptor.from_tensor(queries_and_keys, queries),
        TensorDescriptor.from_tensor(queries_and_keys, keys),
        TensorDescriptor.from_tensor(qkv.contiguous(), keys),
    )
    factor, cap = (softmax.cap, softmax.scale / softmax.cap) if softmax.cap else (softmax.scale, 0.0)
    _kernel(
        (heads, len(starts) - 1, cdiv(longest, tiling.queries)),
        (
            out, *described, starts, out if softmax.sinks is None else softmax.sinks,
            factor * LOG2_E, cap, softmax.window,
        ),
        {
            "KV": kv, "G": heads // kv, "D": dim, "QUERIES": tiling.queries, "BLOCK": tiling.keys,
            "WINDOWED": softmax.window > 0, "CAPPED": softmax.cap > 0, "SINKS": softmax.sinks is not None,
            "PRECISION": precision(qkv),
        },
        warps=tiling.warps,
        stages=tiling.stages,
    )  # fmt: skip
    return out
