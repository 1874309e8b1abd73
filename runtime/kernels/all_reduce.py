"""Sums and gathers over ranks in one kernel: every rank writes its part into memory of all others, and waits for theirs.

Parts travel as packets (packets.py). All ranks add up all parts in rank order in float32, so all get the same bits of a sum,
rounded once. The residual add and RMSNorm that follow a sum in the model can be done in the same pass, and the parts may have
been sent before, by the product that made them (linear.py's `send_linear`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import EARLY, Kernel, cdiv, power_of_2, start_dependents, start_dependents_late, wait_for_inputs
from .norm import rms_scale
from .packets import DATA_BYTES, Workspace, as_data, as_numbers, packets_of, receive, send

CHUNK = 512
"""Packets that a program takes at a time when there is no norm whose rows give the size."""

MOST_PROGRAMS = 128

PATIENCE = 1 << 30
"""How often a program looks for packets before it gives up and returns NaN: longer than the front waits for a step."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _send_rows(x_ptr, buffers, count, numel, rank, most, WORLD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """This program's rows to every rank."""
    columns = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), tl.cdiv(numel, SIZE), tl.num_programs(0)):
        at = row * SIZE + columns
        inside = (columns < SIZE) & (at < numel)
        send(tl.load(x_ptr + at, mask=inside, other=0), at, inside, buffers, count, rank, most, WORLD)


@triton.jit
def _count_on(counts, count, PROGRAMS: tl.constexpr):
    """Every call counts for all programs, however many it has."""
    every = tl.arange(0, PROGRAMS)
    tl.store(counts + every, every * 0 + count, mask=every % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _all_reduce(
    x_ptr, buffers, counts, residual_ptr, weight_ptr, normed_ptr, total_ptr, eps, numel, rank, most, patience,
    WORLD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, SENT: tl.constexpr, NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of SIZE packets of HALVES numbers, numel in all; x, residual, normed and total are packets' data, int32.

    SENT: the kernel before this one, a product that lets this one start late, has sent x. What it waited for has ended by
    then, so counts and residual can be read, and packets be looked for, while its last programs are still at work.
    """
    start_dependents(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    in_row = columns < SIZE
    low_weight, high_weight = 0.0, 0.0
    if HAS_WEIGHT:
        low_weight = tl.load(weight_ptr + columns * HALVES, mask=in_row, other=0.0).to(tl.float32)
        high_weight = tl.load(weight_ptr + columns * HALVES + HALVES - 1, mask=in_row, other=0.0).to(tl.float32)
    if not SENT:
        wait_for_inputs(PDL)
    count = tl.load(counts + program, volatile=True) + 1
    rows = tl.cdiv(numel, SIZE)
    if not SENT:
        _send_rows(x_ptr, buffers, count, numel, rank, most, WORLD, SIZE, BLOCK)
    mine = packets_of(buffers, rank)
    for row in range(program, rows, programs):
        at = row * SIZE + columns
        inside = in_row & (at < numel)
        # Asked for before the wait, so that it need not be waited for after it.
        residual = tl.load(residual_ptr + at, mask=inside, other=0) if HAS_RESIDUAL else 0
        low, high, arrived = receive(mine, count, at, inside, most, patience, WORLD, HALVES, DTYPE)
        if SENT:
            wait_for_inputs(PDL)  # the results' memory may be what the product reads
        low = _round(tl.where(arrived == 1, low, float("nan")), DTYPE)
        high = _round(tl.where(arrived == 1, high, float("nan")), DTYPE)
        if HAS_RESIDUAL:
            low = _round(low + as_numbers(residual, 0, HALVES, DTYPE), DTYPE)
            high = _round(high + as_numbers(residual, 1, HALVES, DTYPE), DTYPE)
        tl.store(total_ptr + at, as_data(low, high, HALVES, DTYPE), mask=inside)
        if NORM:
            low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
            squares = low * low + high * high if HALVES == 2 else low * low
            inverse = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / (SIZE * HALVES) + eps)
            low = rms_scale(low, low_weight, inverse, HAS_WEIGHT, ONE_PLUS, CAST_FIRST, DTYPE)
            high = rms_scale(high, high_weight, inverse, HAS_WEIGHT, ONE_PLUS, CAST_FIRST, DTYPE)
            tl.store(normed_ptr + at, as_data(low, high, HALVES, DTYPE), mask=inside)
    start_dependents_late(PDL)
    _count_on(counts, count, PROGRAMS)


@triton.jit
def _all_gather(
    x_ptr, buffers, counts, out_ptr, numel, rank, most, patience,
    WORLD: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chunks of SIZE packets, numel of every rank; x and out are the data of packets, int32."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    count = tl.load(counts + tl.program_id(0)) + 1
    _send_rows(x_ptr, buffers, count, numel, rank, most, WORLD, SIZE, SIZE)
    mine = packets_of(buffers, rank)
    for chunk in range(tl.program_id(0), tl.cdiv(numel, SIZE), tl.num_programs(0)):
        at = chunk * SIZE + tl.arange(0, SIZE)
        inside = at < numel
        for sender in tl.static_range(WORLD):
            arrived, looks = 0, 0
            data = tl.zeros([SIZE], tl.int32)
            while (arrived == 0) & (looks < patience):
                place = mine + ((count & 1) * WORLD + sender) * most + at
                packet = tl.load(place, mask=inside, other=0, volatile=True)
                data = packet.to(tl.int32)
                right = (packet >> 32).to(tl.int32) == count
                arrived = tl.min((right | (inside == 0)).to(tl.int32), 0)
                looks += 1
            # All ones are NaN in every floating type.
            tl.store(out_ptr + sender * numel + at, tl.where(arrived == 1, data, -1), mask=inside)
    start_dependents_late(PDL)
    _count_on(counts, count, PROGRAMS)


_kernel = Kernel(_all_reduce, trigger=EARLY)
_gather_kernel = Kernel(_all_gather, trigger=EARLY)


def all_reduce(x: torch.Tensor, workspace: Workspace, patience: int = PATIENCE) -> torch.Tensor:
    """The sum of every rank's `x`, a new tensor; NaN where a rank does not come.

    `x` is contiguous, a multiple of 4 bytes, and at most the workspace's `most_bytes`.
    """
    total = torch.empty_like(x)
    constants = dict.fromkeys(("SENT", "NORM", "HAS_RESIDUAL", "HAS_WEIGHT", "ONE_PLUS", "CAST_FIRST"), False)
    _launch(workspace, (x, x, x, total, total), 0.0, CHUNK, constants, patience)
    return total


def all_gather(x: torch.Tensor, workspace: Workspace, patience: int = PATIENCE) -> torch.Tensor:
    """[ranks, *x.shape], every rank's `x`; NaN or -1 where a rank does not come. `x` as for `all_reduce`, of any dtype."""
    out = x.new_empty((workspace.size, *x.shape))
    data, outs = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    _gather_kernel(
        (min(cdiv(len(data), CHUNK), MOST_PROGRAMS),),
        (data, workspace.buffers, workspace.counts, outs, len(data), workspace.rank, workspace.most_packets, patience),
        {"WORLD": workspace.size, "SIZE": CHUNK, "PROGRAMS": MOST_PROGRAMS},
        warps=8,
    )
    return out


def all_reduce_add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    workspace: Workspace,
    *,
    one_plus: bool = False,
    cast_first: bool = True,
    patience: int = PATIENCE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(s + residual), s + residual) of the sum s of every rank's `x`, all contiguous [T, H] of one dtype.

    A row is a multiple of 4 bytes. Without `x` this rank's part is what `send_linear` sent: no kernel comes between, and
    `residual` was made before.
    """
    like = x if x is not None else residual
    assert like is not None
    normed, total = torch.empty_like(like), torch.empty_like(like)
    constants = {
        "SENT": x is None, "NORM": True, "HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None,
        "ONE_PLUS": one_plus, "CAST_FIRST": cast_first,
    }  # fmt: skip
    size = like.shape[-1] * like.element_size() // DATA_BYTES
    places = (like, like if residual is None else residual, like if weight is None else weight, normed, total)
    _launch(workspace, places, eps, size, constants, patience)
    return normed, total


def _launch(
    workspace: Workspace, tensors: tuple[torch.Tensor, ...], eps: float, size: int, constants: dict, patience: int
) -> None:
    x, residual, weight, normed, total = tensors
    data = [each.view(-1).view(torch.int32) for each in (x, residual, normed, total)]
    numel, block = len(data[0]), power_of_2(size)
    sizes = {
        "WORLD": workspace.size, "SIZE": size, "BLOCK": block, "PROGRAMS": MOST_PROGRAMS,
        "HALVES": DATA_BYTES // x.element_size(), "DTYPE": _DTYPES[x.dtype],
    }  # fmt: skip
    _kernel(
        (min(cdiv(numel, size), MOST_PROGRAMS),),
        (data[0], workspace.buffers, workspace.counts, data[1], weight, *data[2:], eps, numel, workspace.rank,
         workspace.most_packets, patience),
        {**sizes, **constants},
        warps=min(32, max(1, block // 64)),
    )  # fmt: skip
