"""The likeliest token of every sequence, inside the graph of a decode step: with greedy requests no more is needed."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .launch import Kernel, cdiv, power_of_2, start_dependents, wait_for_inputs

BLOCK = 4096


@triton.jit
def _argmax(
    logits_ptr, values, indices, counters, ids_ptr, failed_ptr, rows, last_ids, V,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, KEEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence and BLOCK of its logits; the last program of a sequence to finish compares the blocks' maxima."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    s, split = tl.program_id(0), tl.program_id(1)
    at = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + s.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, at, V - 1), 0)
    tl.store(values + s * SPLITS + split, tl.where(broken, float("inf"), top))
    tl.store(indices + s * SPLITS + split, first)
    tl.debug_barrier()
    if tl.atomic_add(counters + s, 1, sem="acq_rel") == SPLITS - 1:
        i = tl.arange(0, SPLITS_PAD)
        tops = tl.load(values + s * SPLITS + i, mask=i < SPLITS, other=float("-inf"), cache_modifier=".cg")
        firsts = tl.load(indices + s * SPLITS + i, mask=i < SPLITS, other=0, cache_modifier=".cg")
        top = tl.max(tops, 0)
        token = tl.min(tl.where((tops == top) & (i < SPLITS), firsts, V - 1), 0)
        tl.store(ids_ptr + s, token)
        tl.store(failed_ptr + s, (tl.abs(top) == float("inf")).to(tl.int8))
        if KEEPS:
            tl.store(last_ids + tl.load(rows + s), token)
        tl.store(counters + s, 0)


_kernel = Kernel(_argmax)


_MOST_COUNTERS = 1 << 14


@lru_cache
def _shared_counters(device: torch.device) -> torch.Tensor:
    """Zeros that every launch leaves as zeros: one a sequence."""
    with torch.inference_mode(False):
        return torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)


def counters(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` zeros for a kernel that leaves them as zeros."""
    return _shared_counters(device) if count <= _MOST_COUNTERS else torch.zeros(count, dtype=torch.int32, device=device)


def likeliest(
    logits: torch.Tensor, rows: torch.Tensor | None = None, last_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [S], failed bool [S]) of `logits` [S, V]: the first of the largest; failed where none is finite.

    The ids are also written to `last_ids` int64 at `rows` int32 [S], where given. A NaN or +inf anywhere in a row
    fails it.
    """
    count, vocab = logits.shape
    splits = cdiv(vocab, BLOCK)
    values = torch.empty((count, splits), dtype=torch.float32, device=logits.device)
    indices = torch.empty((count, splits), dtype=torch.int32, device=logits.device)
    ids = torch.empty(count, dtype=torch.int64, device=logits.device)
    failed = torch.empty(count, dtype=torch.bool, device=logits.device)
    keeps = rows is not None and last_ids is not None
    _kernel(
        (count, splits),
        (
            logits.contiguous(), values, indices, counters(count, logits.device), ids, failed.view(torch.int8),
            rows if keeps else ids, last_ids if keeps else ids, vocab,
        ),
        {"BLOCK": BLOCK, "SPLITS": splits, "SPLITS_PAD": power_of_2(splits), "KEEPS": keeps},
        warps=8,
    )  # fmt: skip
    return ids, failed
