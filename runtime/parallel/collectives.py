"""Collectives with gradients (Megatron-LM, Shoeybi et al. 2019, section 3): each one's backward is the other.

Without gradients they are the communicator's own operations, at no cost.
"""

from __future__ import annotations

from typing import Any

import torch

from ..communicator import Communicator


def tracks_gradients(*tensors: torch.Tensor) -> bool:
    """Whether autograd records what is done with one of `tensors`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def copy_to_ranks(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """`x`, the same on every rank, for a use that differs between ranks: its gradients are added up over ranks."""
    if communicator.size == 1 or not tracks_gradients(x):
        return x
    return _CopyToRanks.apply(x, communicator)  # type: ignore[return-value]


def sum_over_ranks(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """The sum of all ranks' `x`, for a use that is the same on every rank. Without gradients, in place where possible."""
    if not tracks_gradients(x):
        return communicator.all_reduce(x)
    return _SumOverRanks.apply(x, communicator)  # type: ignore[return-value]


def shift(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """`x` of the rank before this one in the ring; its gradient goes back there."""
    if not tracks_gradients(x):
        return communicator.shift(x)
    return _Shift.apply(x, communicator)  # type: ignore[return-value]


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        ctx.communicator = communicator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.communicator.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        return communicator.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        ctx.communicator = communicator
        return communicator.shift(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # All but once round the ring is one step back.
        grad = grads[0]
        for _ in range(ctx.communicator.size - 1):
            grad = ctx.communicator.shift(grad)
        return grad, None
