"""RMSNorm (Zhang and Sennrich 2019) in the variants that differ in where they cast and what they scale by."""

from __future__ import annotations

import torch


class RMSNorm:
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32.

    `one_plus` scales by 1 + w; `cast_first` casts the normed value to the model's dtype before scaling, as Llama
    does, where the others scale in float32 and cast last.
    """

    def __init__(
        self, weight: torch.Tensor | None, eps: float, *, one_plus: bool = False, cast_first: bool = True
    ) -> None:
        self.weight, self.eps, self.one_plus, self.cast_first = weight, eps, one_plus, cast_first

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        values = x.float()
        normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return normed.to(x.dtype)
        if self.cast_first:
            return self.weight * normed.to(x.dtype)
        scale = self.weight.float() + 1 if self.one_plus else self.weight.float()
        return (normed * scale).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual): the two steps between blocks, as one so that kernels can fuse them."""
        total = x if residual is None else x + residual
        return self(total), total
