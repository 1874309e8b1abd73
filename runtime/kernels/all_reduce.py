"""The sum over ranks in one kernel, each reading what the others have put into memory that all can map (one-shot).

A program copies its rows of the rank's tensor into the rank's workspace, meets the same program of every other rank,
adds up all workspaces in rank order in float32, and meets them again before any workspace may be overwritten. So all
ranks get the same bits, rounded once. The residual add and RMSNorm that follow a sum in the model can be done in the
same pass.

Ranks meet through signals, int32 [2 programs, ranks] in each workspace: a sender sets its own to 1, the receiver sets
it back to 0. Each program has two rows that take turns, so that a signal is always taken before it is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import Kernel, cdiv, power_of_2
from .norm import rms_scale

CHUNK = 4096
"""Elements that a program takes at a time when there is no norm whose rows give the size."""

MOST_PROGRAMS = 64

PATIENCE = 1 << 30
"""How often a program looks for signals before it gives up and returns NaN: longer than the front waits for a step."""


@dataclass(frozen=True)
class Workspace:
    """What a kernel needs of a group's symmetric memory: addresses, int64 [ranks], and how many programs can meet."""

    buffers: torch.Tensor
    signals: torch.Tensor
    rank: int
    most_programs: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.buffers)


@triton.jit
def _meet(signals, row, rank, patience, WORLD: tl.constexpr, WORLD_PAD: tl.constexpr):
    """Wait for the same row's signal of every rank; false when it did not come. All that was written before is seen."""
    peer = tl.arange(0, WORLD_PAD)
    inside = peer < WORLD
    theirs = tl.load(signals + peer, mask=inside, other=0).to(tl.pointer_type(tl.int32)) + row * WORLD + rank
    ours = tl.load(signals + rank).to(tl.pointer_type(tl.int32)) + row * WORLD + peer
    zero = tl.zeros([WORLD_PAD], tl.int32)
    tl.debug_barrier()  # every thread's writes come before one of them signals
    tl.atomic_xchg(theirs, zero + 1, mask=inside, sem="release", scope="sys")
    arrived = tl.where(inside, 0, 1)
    looks = 0
    while (tl.min(arrived, 0) == 0) & (looks < patience):
        taken = tl.atomic_xchg(ours, zero, mask=arrived == 0, sem="acquire", scope="sys")
        arrived = tl.where(arrived == 0, taken, arrived)
        looks += 1
    tl.debug_barrier()
    return tl.min(arrived, 0) == 1


@triton.jit
def _rows_of(buffers, rank, dtype):
    """Where a rank's workspace begins: a pointer that is known to be aligned, for wide loads."""
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _all_reduce(
    x_ptr, buffers, signals, residual_ptr, weight_ptr, normed_ptr, total_ptr, eps, numel, rank, patience,
    WORLD: tl.constexpr, WORLD_PAD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    dtype = x_ptr.dtype.element_ty
    mine = _rows_of(buffers, rank, dtype)
    rows = tl.cdiv(numel, SIZE)
    for row in range(program, rows, programs):
        at = row * SIZE + columns
        inside = (columns < SIZE) & (at < numel)
        tl.store(mine + at, tl.load(x_ptr + at, mask=inside, other=0.0), mask=inside)
    met = _meet(signals, 2 * program, rank, patience, WORLD, WORLD_PAD)
    for row in range(program, rows, programs):
        at = row * SIZE + columns
        inside = (columns < SIZE) & (at < numel)
        x = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):
            theirs = _rows_of(buffers, peer, dtype)
            x += tl.load(theirs + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        x = tl.where(met, x, float("nan")).to(dtype).to(tl.float32)
        if HAS_RESIDUAL:
            x = (x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(total_ptr + at, x.to(dtype), mask=inside)
        if NORM:
            weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32) if HAS_WEIGHT else 0.0
            x = tl.where(inside, x, 0.0)
            inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps)
            normed = rms_scale(x, weight, inverse, HAS_WEIGHT, ONE_PLUS, CAST_FIRST, dtype)
            tl.store(normed_ptr + at, normed.to(dtype), mask=inside)
    _meet(signals, 2 * program + 1, rank, patience, WORLD, WORLD_PAD)


# Launched without dependent launch: blocks that wait for another GPU must not start before those they depend on.
_kernel = Kernel(_all_reduce, trigger=0)


def all_reduce(x: torch.Tensor, workspace: Workspace, patience: int = PATIENCE) -> torch.Tensor:
    """The sum of every rank's contiguous `x`, a new tensor; NaN when a rank does not come."""
    total = torch.empty_like(x)
    constants = {"NORM": False, "HAS_RESIDUAL": False, "HAS_WEIGHT": False, "ONE_PLUS": False, "CAST_FIRST": False}
    _launch(x, workspace, (x, x, total, total, 0.0), CHUNK, constants, patience)
    return total


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    workspace: Workspace,
    *,
    one_plus: bool = False,
    cast_first: bool = True,
    patience: int = PATIENCE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(s + residual), s + residual) of the sum s of every rank's `x`, all contiguous [T, H]."""
    normed, total = torch.empty_like(x), torch.empty_like(x)
    constants = {
        "NORM": True, "HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None, "ONE_PLUS": one_plus,
        "CAST_FIRST": cast_first,
    }  # fmt: skip
    others = (x if residual is None else residual, x if weight is None else weight, normed, total, eps)
    _launch(x, workspace, others, x.shape[-1], constants, patience)
    return normed, total


def _launch(x: torch.Tensor, workspace: Workspace, others: tuple, size: int, constants: dict, patience: int) -> None:
    world, block = workspace.size, power_of_2(size)
    programs = min(cdiv(x.numel(), size), workspace.most_programs, MOST_PROGRAMS)
    sizes = {"WORLD": world, "WORLD_PAD": power_of_2(world), "SIZE": size, "BLOCK": block}
    _kernel(
        (programs,),
        (x, workspace.buffers, workspace.signals, *others, x.numel(), workspace.rank, patience),
        {**sizes, **constants},
        warps=min(16, max(1, block // 256)),
    )
