"""The gated feed-forward block: down(act(gate x) * up x)."""

from __future__ import annotations

import torch

from ..kernels import use_kernels
from ..parallel.linear import ColumnParallelLinear, RowParallelLinear, linear_kernel
from .activation import ACTIVATIONS


class GatedMLP:
    """gate and up as one matrix [2 I, H] of this rank's ffn columns, then down with the sum over ranks."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        if use_kernels(x):
            return self.down(linear_kernel()(x, self.gate_up.weight, self.gate_up.bias, self.activation))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)
