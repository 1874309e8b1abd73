"""How kernels are launched: one after another without waiting for the last block to drain.

With programmatic dependent launch (compute capability 9.0 on) the blocks of a kernel start while the kernel before
it still runs. Until `wait_for_inputs` they may only touch what no kernel writes: they ask for weights, so that memory
is busy while the other kernel's results are on their way. Every kernel lets the next one start at once, and every
block waits: a kernel that has ended thereby implies that all before it have.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import INTERPRETED


@lru_cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(x: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Keyword arguments for a kernel on `x`'s device: `options`, and PDL where the device has it."""
    if INTERPRETED or not _has_dependent_launch(x.device):
        return {**options, "PDL": False}
    return {**options, "PDL": True, "launch_pdl": True}


@lru_cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device (a few when interpreted, so that tests split work too)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def precision(x: torch.Tensor) -> str:
    """How `dot` treats operands of `x`'s dtype: float32 is computed as such, not as tf32."""
    if INTERPRETED:
        return "upcast"  # the interpreter multiplies the bit patterns of bfloat16
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b in float32."""
    if PRECISION == "upcast":
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """Let the next kernel's blocks start as soon as there is room for them."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and their results can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(addresses, num_bytes):
    """Ask for `num_bytes` (a multiple of 16) from each of `addresses` (a tensor of pointers) to be brought into L2."""
    sizes = tl.full(addresses.shape, 0, tl.int32) + num_bytes
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses.to(tl.uint64), sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
