"""The gated feed-forward block: down(act(gate x) * up x)."""

from __future__ import annotations

import torch

from .activation import ACTIVATIONS
from .linear import ColumnParallelLinear, RowParallelLinear


class GatedMLP:
    """gate and up as one matrix [2 I, H] of this rank's ffn columns, then down with the sum over ranks."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear, activation: str) -> None:
        self.gate_up, self.down, self.act = gate_up, down, ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)
