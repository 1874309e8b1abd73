"""RMSNorm (Zhang and Sennrich 2019) over a width that is cut over ranks: one number a token is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..communicator import Communicator
from .collectives import copy_to_ranks, sum_over_ranks
from .sizes import agree


class SplitRMSNorm:
    """w * x / sqrt(mean(x^2) + eps), the mean being over all ranks' columns; several tensors share one exchange.

    `weights` are this rank's columns, `widths` those of all ranks together. `counts` is false for a tensor whose
    columns a lower rank holds too: they are counted once. Computed in `dtype`.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        widths: Sequence[int],
        eps: float,
        communicator: Communicator,
        *,
        counts: Sequence[bool] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        agree("widths of a norm", len(widths), len(weights))
        self.weights, self.widths, self.eps, self.communicator = tuple(weights), tuple(widths), eps, communicator
        self.counts, self.dtype = tuple(counts or [True] * len(self.widths)), dtype

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each [T, columns] -> the same, normed"""
        values = [x.to(self.dtype) for x in tensors]
        sums = [x.square().sum(-1) for x in values]
        counted = [s if counts else torch.zeros_like(s) for s, counts in zip(sums, self.counts, strict=True)]
        # Every rank scales columns of its own by the sum, so that its gradient comes from all of them.
        total = copy_to_ranks(sum_over_ranks(torch.stack(counted), self.communicator), self.communicator)
        parts = zip(values, total.unsqueeze(-1), self.weights, self.widths, strict=True)
        normed = [w * (x * torch.rsqrt(s / width + self.eps)) for x, s, w, width in parts]
        return tuple(y.to(x.dtype) for x, y in zip(tensors, normed, strict=True))
