"""Penalties on the logits of many sequences, each with a history of its own, in one launch; and counting their tokens.

A history is found by its address, so that none of them has to be copied into a batch.

Shapes: S sequences of the batch, P of them with penalties, V vocabulary (padding included).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Kernel, cdiv, start_dependents, wait_for_inputs

BLOCK = 2048


@triton.jit
def _penalise(
    logits_ptr, rows, addresses, repetitions, presences, frequencies, V, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row and BLOCK of its tokens. `addresses` int64 [P, 2]: of the counts int32 [V], and of the prompt's tokens."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    p = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    counts_ptr = tl.multiple_of(tl.load(addresses + 2 * p).to(tl.pointer_type(tl.int32)), 16)
    prompt_ptr = tl.multiple_of(tl.load(addresses + 2 * p + 1).to(tl.pointer_type(tl.int8)), 16)
    row_ptr = logits_ptr + tl.load(rows + p) * V
    x = tl.load(row_ptr + at, mask=inside, other=0.0)
    counts = tl.load(counts_ptr + at, mask=inside, other=0)
    seen = (tl.load(prompt_ptr + at, mask=inside, other=0) != 0) | (counts > 0)
    repetition = tl.load(repetitions + p)
    x = tl.where(seen, tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
    x = x - tl.load(frequencies + p) * counts.to(tl.float32) - tl.where(counts > 0, tl.load(presences + p), 0.0)
    tl.store(row_ptr + at, x, mask=inside)


@triton.jit
def _count(rows_and_addresses, ids_ptr, PDL: tl.constexpr):
    """One token of one history more."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    p = tl.program_id(0)
    counts_ptr = tl.load(rows_and_addresses + 2 * p + 1).to(tl.pointer_type(tl.int32))
    tl.atomic_add(counts_ptr + tl.load(ids_ptr + tl.load(rows_and_addresses + 2 * p)), 1, sem="relaxed")


_penalise_kernel, _count_kernel = Kernel(_penalise), Kernel(_count)


def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    addresses: torch.Tensor,
    repetitions: torch.Tensor,
    presences: torch.Tensor,
    frequencies: torch.Tensor,
) -> None:
    """Apply the three penalties, float32 [P], to the rows `rows` int64 [P] of `logits` float32 [S, V], in place.

    `addresses` int64 [P, 2]: on the same device, where each row's `TokenHistory` has `generated` and `in_prompt`.
    """
    vocab = logits.shape[-1]
    _penalise_kernel(
        (len(rows), cdiv(vocab, BLOCK)),
        (logits, rows, addresses, repetitions, presences, frequencies, vocab),
        {"BLOCK": BLOCK},
        warps=8,
    )


def count_tokens(rows_and_addresses: torch.Tensor, ids: torch.Tensor) -> None:
    """Count the ids int64 [S] of some rows in the counts at their addresses: int64 [P, 2], a row and an address each."""
    _count_kernel((len(rows_and_addresses),), (rows_and_addresses, ids), {}, warps=1)
