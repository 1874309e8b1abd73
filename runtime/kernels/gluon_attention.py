# type: ignore  # Gluon's decorators and `constexpr` parameters are beyond a type checker
"""Attention of whole prompts in Gluon, Triton's lower level, where one product may run beside the softmax of another.

Scores of one tile of keys and the sum over the values of the tile before are both given to the tensor cores before
the softmax begins, which runs beside the second (FlashAttention-3, Shah et al. 2024). For compute capability 9.0, whose
products these are; without window, cap or sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Kernel, cdiv

# Both have changed their names: after Triton 3.6, and after 3.8.
wait_for_warps = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _fetch(rows, buffers, ready, turn, turns, start, column, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Ask for the tile of a turn, if there is such a turn: the last keys come first."""
    wanted = turn < turns
    mbarrier.expect(ready.index(turn % STAGES), rows.block_type.nbytes, pred=wanted)
    first = start + (turns - 1 - turn) * BLOCK
    load_tile(rows, [first, column], ready.index(turn % STAGES), buffers.index(turn % STAGES), pred=wanted)


@gluon.jit
def _softmax(scores, highest, total, factor):
    new_highest = gl.maximum(highest, gl.max(scores, 1))
    base = new_highest * factor
    weights = gl.exp2(scores * factor - gl.expand_dims(base, 1))
    shrink = gl.exp2(highest * factor - base)
    return weights, shrink, new_highest, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _masked(scores, first, first_query, QUERIES: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
    at = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, layout))
    keys = first + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    seen = gl.expand_dims(keys, 0) <= gl.expand_dims(at, 1)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit(do_not_specialize_on_alignment=["starts"])
def _gluon_attention(
    out_ptr, q_rows, k_rows, v_rows, starts, factor,
    KV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    query_head, s = gl.program_id(0), gl.program_id(1)
    tile = gl.num_programs(2) - 1 - gl.program_id(2)
    start, stop = gl.load(starts + s), gl.load(starts + s + 1)
    first_query = start + tile * QUERIES
    if first_query >= stop:
        return
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    dtype: gl.constexpr = q_rows.dtype
    q_tile = gl.allocate_shared_memory(dtype, [QUERIES, D], q_rows.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], k_rows.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], v_rows.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    wait_for_warps()

    head = query_head // G
    k_column, v_column = (KV * G + head) * D, (KV * G + KV + head) * D
    turns = (gl.minimum(first_query + QUERIES, stop) - start + BLOCK - 1) // BLOCK
    mbarrier.expect(q_ready, q_rows.block_type.nbytes)
    load_tile(q_rows, [first_query, query_head * D], q_ready, q_tile)
    for i in gl.static_range(STAGES):
        _fetch(k_rows, k_tiles, k_ready, i, turns, start, k_column, BLOCK, STAGES)
        _fetch(v_rows, v_tiles, v_ready, i, turns, start, v_column, BLOCK, STAGES)

    zeros = gl.zeros([QUERIES, BLOCK], gl.float32, score_layout)
    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    wait_for_warps()
    _fetch(k_rows, k_tiles, k_ready, STAGES, turns, start, k_column, BLOCK, STAGES)
    scores = _masked(scores, start + (turns - 1) * BLOCK, first_query, QUERIES, BLOCK, score_layout)
    highest = gl.full([QUERIES], -1e30, gl.float32, gl.SliceLayout(1, score_layout))
    total = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, score_layout))
    weights, shrink, highest, total = _softmax(scores, highest, total, factor)
    p = gl.convert_layout(weights.to(dtype), weight_layout)
    acc = gl.zeros([QUERIES, D], gl.float32, out_layout)
    for turn in range(1, turns):
        mbarrier.wait(k_ready.index(turn % STAGES), (turn // STAGES) & 1)
        scores = warpgroup_mma(
            q_tile, k_tiles.index(turn % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        before = turn - 1
        mbarrier.wait(v_ready.index(before % STAGES), (before // STAGES) & 1)
        acc = warpgroup_mma(p, v_tiles.index(before % STAGES), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        if BLOCK < QUERIES:
            if turn < QUERIES // BLOCK:
                first = start + (turns - 1 - turn) * BLOCK
                scores = _masked(scores, first, first_query, QUERIES, BLOCK, score_layout)
        weights, shrink, highest, total = _softmax(scores, highest, total, factor)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        wait_for_warps()  # every warp is done with both tiles
        _fetch(k_rows, k_tiles, k_ready, turn + STAGES, turns, start, k_column, BLOCK, STAGES)
        _fetch(v_rows, v_tiles, v_ready, before + STAGES, turns, start, v_column, BLOCK, STAGES)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, out_layout)), 1)
        p = gl.convert_layout(weights.to(dtype), weight_layout)
    before = turns - 1
    mbarrier.wait(v_ready.index(before % STAGES), (before // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(before % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    wait_for_warps()  # what follows may go through the memory of the tiles
    out = acc / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, out_layout)), 1)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    out = gl.convert_layout(out.to(dtype), store_layout)
    at = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, store_layout))
    d = gl.arange(0, D, gl.SliceLayout(0, store_layout))
    to = out_ptr + gl.expand_dims(at.to(gl.int64), 1) * (KV * G * D) + query_head * D + gl.expand_dims(d, 0)
    gl.store(to, out, mask=gl.expand_dims(at < stop, 1))


_kernel = Kernel(_gluon_attention)


def gluon_attention(
    rotated: torch.Tensor,
    qkv: torch.Tensor,
    kv: int,
    starts: torch.Tensor,
    longest: int,
    factor: float,
    tiling: Any,
    out: torch.Tensor,
) -> None:
    """As prompt_attention, whose PromptTiling it takes; `factor` turns scores into exponents of two."""
    heads, dim = rotated.shape[1] - kv, rotated.shape[2]
    layout = gl.NVMMASharedLayout.get_default_for([tiling.keys, dim], gl.bfloat16)
    sides = ((rotated.flatten(1), tiling.queries), (rotated.flatten(1), tiling.keys), (qkv.contiguous(), tiling.keys))
    rows = [TensorDescriptor.from_tensor(x, [block, dim], layout) for x, block in sides]
    _kernel(
        (heads, len(starts) - 1, cdiv(longest, tiling.queries)),
        (out, *rows, starts, factor),
        {
            "KV": kv, "G": heads // kv, "D": dim, "QUERIES": tiling.queries, "BLOCK": tiling.keys,
            "STAGES": tiling.stages, "WARPS": tiling.warps,
        },
        warps=tiling.warps,
        stages=1,
    )  # fmt: skip
