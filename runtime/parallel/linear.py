"""Linear layers and embeddings whose weights are cut over the ranks (Megatron-LM, Shoeybi et al. 2019).

Shapes: T tokens, H hidden, V vocabulary, L tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from ...shardplan.sharing import Range
from ..communicator import Communicator, SingleRank
from ..kernels import use_kernels
from .collectives import copy_to_ranks, sum_over_ranks, tracks_gradients
from .sequence import gather_parts
from .sizes import agree


@cache
def linear_kernel() -> Callable[..., torch.Tensor]:
    """runtime/kernels/linear.py's `linear`, imported only where kernels run: once, since that takes microseconds."""
    from ..kernels.linear import linear

    return linear


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, [T, in] -> [T, out], by what is fastest where x is"""
    if use_kernels(x) and not tracks_gradients(x, weight):
        return linear_kernel()(x, weight, bias)
    return F.linear(x, weight, bias)


class ColumnParallelLinear:
    """y = x W^T + b for this rank's rows of W [out, H]: every rank holds a different part of the output."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, communicator: Communicator | None = None
    ) -> None:
        self.weight, self.bias, self.communicator = weight, bias, communicator or SingleRank()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, out]"""
        return product(copy_to_ranks(x, self.communicator), self.weight, self.bias)


class ReplicatedLinear(ColumnParallelLinear):
    """y = x W^T + b with all of W on every rank: every rank holds the whole output."""


class SendsProducts(Protocol):
    """A communicator whose products send their part of a sum themselves."""

    def send_product(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Send x W^T [T, H], or return false."""
        ...


class RowParallelLinear:
    """y = scale (x W^T + b) for this rank's columns of W [H, in].

    Partial sums are added up over ranks, then the whole bias. With `leaves_sum` the norm after it does that, with
    `sends_to` of what has been sent already (see layers/fused_sums.py).
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, communicator: Communicator, scale: float = 1.0
    ) -> None:
        self.weight, self.bias, self.communicator, self.scale = weight, bias, communicator, scale
        self.leaves_sum = False
        self.sends_to: SendsProducts | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, H], or [T, 0] where it has been sent"""
        if self.sends_to is not None and self.sends_to.send_product(x, self.weight):
            return x.new_empty((len(x), 0))
        if self.leaves_sum:
            return product(x, self.weight)
        y = sum_over_ranks(product(x, self.weight), self.communicator)
        y = y if self.bias is None else y + self.bias
        return y if self.scale == 1.0 else y * self.scale


class VocabParallelEmbedding:
    """Rows [start, stop) of the embedding, times `scale`; ids of other ranks contribute zero to the sum over ranks.

    An id of no rank gives zeros, where there are several.
    """

    def __init__(self, weight: torch.Tensor, rows: Range, communicator: Communicator, scale: float = 1.0) -> None:
        agree(f"rows of the embedding of rank {communicator.rank}", len(weight), rows[1] - rows[0])
        self.weight, self.rows, self.communicator, self.scale = weight, rows, communicator, scale

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]"""
        x = self._look_up(ids)
        return x if self.scale == 1.0 else x * self.scale

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        if self.communicator.size == 1:
            return F.embedding(ids, self.weight)
        start, stop = self.rows
        if start == stop:  # nothing to look up, but gradients go the same way as on the other ranks
            return sum_over_ranks(self.weight.new_zeros(*ids.shape, 0) @ self.weight, self.communicator)
        row = ids - start
        inside = row.clamp(0, stop - start - 1)
        return sum_over_ranks(F.embedding(inside, self.weight) * (row == inside).unsqueeze(-1), self.communicator)


class ParallelLMHead:
    """Logits from this rank's rows of the vocabulary, gathered over ranks, which may hold unequal numbers of rows.

    Logits are divided by `divisor`, then bounded by `softcap`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        ranges: list[Range],
        communicator: Communicator,
        *,
        divisor: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.weight, self.communicator = weight, communicator
        self.sizes = [stop - start for start, stop in ranges]
        self.divisor, self.softcap = divisor, softcap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, V]"""
        local = self._scaled(product(copy_to_ranks(x, self.communicator), self.weight))
        return gather_parts(local, self.sizes, self.communicator, dim=-1)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
