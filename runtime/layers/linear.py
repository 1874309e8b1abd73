"""Linear layers and embeddings whose weights are cut over the ranks (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...shardplan.sharing import Range
from ..communicator import Communicator


class ColumnParallelLinear:
    """y = x W^T + b for this rank's rows of W [out, H]: every rank holds a different part of the output."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, out]"""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear:
    """y = x W^T + b for this rank's columns of W [H, in]: partial sums are added up over ranks, then the whole bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, communicator: Communicator) -> None:
        self.weight, self.bias, self.communicator = weight, bias, communicator

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, H]"""
        y = self.communicator.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding:
    """Rows [start, stop) of the embedding; ids of other ranks contribute zero to the sum over ranks."""

    def __init__(self, weight: torch.Tensor, rows: Range, communicator: Communicator) -> None:
        self.weight, self.rows, self.communicator = weight, rows, communicator

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]"""
        if self.communicator.size == 1:
            return F.embedding(ids, self.weight)
        start, stop = self.rows
        mine = (ids >= start) & (ids < stop)
        x = F.embedding(torch.where(mine, ids - start, 0), self.weight)
        return self.communicator.all_reduce(x * mine.unsqueeze(-1))


class ParallelLMHead:
    """Logits from this rank's rows of the vocabulary, gathered over ranks.

    Ranks may hold unequal numbers of rows: the shorter ones are padded with -inf, which never wins.
    """

    def __init__(self, weight: torch.Tensor, ranges: list[Range], communicator: Communicator) -> None:
        self.weight, self.communicator = weight, communicator
        self.sizes = [stop - start for start, stop in ranges]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, V]"""
        local = F.linear(x, self.weight)
        if self.communicator.size == 1:
            return local
        widest = max(self.sizes)
        padded = F.pad(local, (0, widest - local.shape[-1]), value=float("-inf"))
        parts = self.communicator.all_gather(padded)
        return torch.cat([parts[r, :, :size] for r, size in enumerate(self.sizes)], dim=-1)
