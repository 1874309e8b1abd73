"""Residual add and RMSNorm in one pass over the hidden states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Kernel, power_of_2, start_dependents, start_dependents_late, wait_for_inputs


@triton.jit
def rms_scale(x, weight, inverse, HAS_WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr, DTYPE):
    """x * inverse * weight (float32), rounded where the model rounds: to DTYPE before the weight when CAST_FIRST."""
    x = x * inverse
    if HAS_WEIGHT:
        if ONE_PLUS:
            weight += 1.0
        if CAST_FIRST:
            x = x.to(DTYPE).to(tl.float32)
        x = x * weight
    return x


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_dependents(PDL)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = normed_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) if HAS_WEIGHT else 0.0
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x = (x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(total_ptr + at, x.to(dtype), mask=inside)
    start_dependents_late(PDL)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps)
    normed = rms_scale(x, weight, inverse, HAS_WEIGHT, ONE_PLUS, CAST_FIRST, dtype)
    tl.store(normed_ptr + at, normed.to(dtype), mask=inside)


_kernel = Kernel(_add_rms_norm)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    one_plus: bool = False,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), all [..., size] of one dtype; without a residual the sum is `x` itself."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    size = x.shape[-1]
    if x.numel():
        block = power_of_2(size)
        second = x if residual is None else residual.contiguous()
        _kernel(
            (x.numel() // size,),
            (x, second, x if weight is None else weight, normed, total, eps),
            {
                "SIZE": size, "BLOCK": block, "HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None,
                "ONE_PLUS": one_plus, "CAST_FIRST": cast_first,
            },
            warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return normed, total
