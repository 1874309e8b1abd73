"""Scattering a sequence over ranks and gathering it again, with gradients. Ranks may have unequal parts, or none.

Shapes: L positions of the whole sequence, n of this rank, along dimension `dim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..communicator import Communicator
from .collectives import tracks_gradients
from .ranges import SequenceLayout
from .sizes import agree


def gather_parts(x: torch.Tensor, sizes: Sequence[int], communicator: Communicator, dim: int = 0) -> torch.Tensor:
    """All ranks' parts along `dim`, one after another; `sizes` says how large each is.

    With gradients: for a use that is the same on every rank, as `sum_over_ranks`.
    """
    agree("sizes of parts", len(sizes), communicator.size)
    agree(f"dimension {dim} of the part of rank {communicator.rank}", x.shape[dim], sizes[communicator.rank])
    if communicator.size == 1:
        return x
    if not tracks_gradients(x):
        return _gather(x, sizes, communicator, dim)
    return _GatherParts.apply(x, sizes, communicator, dim)  # type: ignore[return-value]


def gather_sequence(
    x: torch.Tensor, layout: SequenceLayout, communicator: Communicator, dim: int = 0, order: torch.Tensor | None = None
) -> torch.Tensor:
    """[.., n, ..] -> [.., L, ..]: the whole sequence, in its own order, on every rank.

    `order` is `restored_order(layout)`, for callers that gather often.
    """
    parts = gather_parts(x, layout.sizes, communicator, dim)
    return parts.index_select(dim, restored_order(layout, x.device) if order is None else order)


def restored_order(layout: SequenceLayout, device: torch.device | None = None) -> torch.Tensor:
    """[L]: where in the ranks' parts, one after another, each position of the sequence is."""
    return torch.cat([own_positions(layout, rank, device) for rank in range(len(layout.pieces))]).argsort()


def scatter_sequence(x: torch.Tensor, layout: SequenceLayout, communicator: Communicator, dim: int = 0) -> torch.Tensor:
    """[.., L, ..], the same on every rank -> [.., n, ..]: this rank's positions. Gradients come back whole."""
    agree("ranks of the layout", len(layout.pieces), communicator.size)
    agree(f"dimension {dim} of the sequence", x.shape[dim], layout.length)
    if communicator.size == 1 or not tracks_gradients(x):
        return x.index_select(dim, own_positions(layout, communicator.rank, x.device))
    return _ScatterSequence.apply(x, layout, communicator, dim)  # type: ignore[return-value]


def own_positions(layout: SequenceLayout, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """[n]: the positions that `rank` has, in its order."""
    pieces = [(0, 0), *layout.pieces[rank]]
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in pieces])


def _gather(x: torch.Tensor, sizes: Sequence[int], communicator: Communicator, dim: int) -> torch.Tensor:
    widest, last = max(sizes), x.dim() - 1
    if min(sizes) < widest:  # what is gathered must have the same size on every rank
        dim = dim % x.dim()
        x = F.pad(x, [0, 0] * (last - dim) + [0, widest - x.shape[dim]])
    parts = communicator.all_gather(x)
    if min(sizes) == widest and dim == 0:
        return parts.flatten(0, 1)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Sequence[int], communicator: Communicator, dim: int) -> torch.Tensor:
        ctx.dim, ctx.start, ctx.size = dim, sum(sizes[: communicator.rank]), sizes[communicator.rank]
        return _gather(x, sizes, communicator, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].narrow(ctx.dim, ctx.start, ctx.size), None, None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layout: SequenceLayout, communicator: Communicator, dim: int
    ) -> torch.Tensor:
        ctx.layout, ctx.communicator, ctx.dim = layout, communicator, dim
        return x.index_select(dim, own_positions(layout, communicator.rank, x.device))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gather_sequence(grads[0], ctx.layout, ctx.communicator, ctx.dim), None, None, None
