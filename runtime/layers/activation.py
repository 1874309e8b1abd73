"""Activation functions by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class GatedActivation:
    """act(gate) * up, gate and up being halves [.., 2 I] -> [.., I]."""

    def __init__(self, activation: str) -> None:
        self.act = ACTIVATIONS[activation]

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[.., 2 I] -> [.., I]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act(gate) * up


class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), both clamped to `limit`, gate and up alternating (gpt-oss)."""

    def __init__(self, alpha: float, limit: float) -> None:
        self.alpha, self.limit = alpha, limit

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[.., 2 I] -> [.., I]"""
        gate = gate_up[..., 0::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
