"""How kernels are launched: one after another without waiting for the last block to drain.

With programmatic dependent launch (compute capability 9.0 on) the blocks of a kernel start while the kernel before
it still runs. Until `wait_for_inputs` they may only touch what no kernel writes: they ask for weights, so that memory
is busy while the other kernel's results are on their way. Every block waits: a kernel that has ended thereby implies
that all before it have. Small kernels let the next one start at once. Products do so only when their own weights are
on the way: blocks that merely wait would else take the place of blocks that still have weights to ask for, which cost
6 % of a whole step (docs/performance.md).
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


EARLY, LATE = 1, 2
"""When a kernel lets the next one start: at once, or when its own loads are done. 0 stands for no dependent launch."""


class Kernel:
    """A Triton kernel with a short way to launch what has been compiled already.

    Triton's own way takes tens of microseconds, which a prefill step of a few hundred kernels cannot hide. Runtime
    arguments come first in the kernel's signature, then constants, the last of which is PDL.
    """

    def __init__(self, function: Any, trigger: int = EARLY) -> None:
        self.function, self.trigger = function, trigger
        self._compiled: dict[tuple, tuple[Any, tuple]] = {}  # with the values of its constants

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any], *, warps: int, stages: int = 3
    ) -> None:
        """Launch on the current stream. The first argument is a tensor on the device to use."""
        index = arguments[0].device.index
        # What is compiled is loaded into one device's context: a process that moves to another compiles again.
        key = (index, self.trigger, warps, stages, *constants.values(), *_specializations(arguments))
        known = self._compiled.get(key)
        if known is None:
            known = self._compile(grid, arguments, constants, warps, stages)
            if known is not None:
                self._compiled[key] = known
            return
        compiled, values = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *values, stream=torch._C._cuda_getCurrentRawStream(index))

    def _compile(
        self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any], warps: int, stages: int
    ) -> tuple[Any, tuple] | None:
        """Launch Triton's way: what was compiled, and its constants' values; None where it is interpreted."""
        pdl = self.trigger if not INTERPRETED and _has_dependent_launch(arguments[0].device) else 0
        options = {"launch_pdl": True} if pdl else {}
        constants = {**constants, "PDL": pdl}
        compiled = self.function[grid](*arguments, **constants, num_warps=warps, num_stages=stages, **options)
        return None if INTERPRETED else (compiled, tuple(constants.values()))


def _specializations(arguments: tuple) -> list[Any]:
    """What Triton compiles a kernel for, besides its constants: dtypes, and what is a multiple of 16."""
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found += argument.dtype, argument.data_ptr() % 16 == 0
        elif isinstance(argument, int):
            found += argument % 16 == 0, argument == 1
        elif not isinstance(argument, float):  # a tensor descriptor
            found += argument.base.dtype, *argument.block_shape
    return found


def cdiv(a: int, b: int) -> int:
    """a / b rounded up: Triton's own of that name takes microseconds, since it also serves kernels."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n > 0, without what Triton's own costs."""
    return 1 << (n - 1).bit_length()


@lru_cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device (a few when interpreted, so that tests split work too)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache
def takes_large_tiles(device: torch.device) -> bool:
    """Whether a program may use as much shared memory as the tilings that were tuned on an H200 do."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 200 << 10


def index_type(cache: torch.Tensor) -> Any:
    """The type of offsets into `cache`: 64-bit arithmetic only where 32 do not reach."""
    return tl.int32 if cache.numel() < 1 << 31 else tl.int64


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
    """Let the next kernel's blocks start as soon as there is room for them, if this kernel does so early."""
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def start_dependents_late(PDL: tl.constexpr):
    """The same for a kernel that does so late."""
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and their results can be read."""
    if PDL:
        gdc_wait()
