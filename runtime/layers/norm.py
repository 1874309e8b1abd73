"""RMSNorm (Zhang and Sennrich 2019) in the variants that differ in where they cast and what they scale by."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from ..kernels import use_kernels


@cache
def _kernel() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The kernel, which is imported only where kernels run: once, since an import statement takes microseconds."""
    from ..kernels.norm import add_rms_norm

    return add_rms_norm


class Summing(Protocol):
    """A communicator that also norms (see fused_sums.py)."""

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        one_plus: bool,
        cast_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(s + residual), s + residual), s being the sum of `x` over ranks, or of what was sent if `x` is [T, 0]."""
        ...


class RMSNorm:
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32.

    `one_plus` scales by 1 + w; `cast_first` casts the normed value to the model's dtype before scaling, as Llama
    does, where the others scale in float32 and cast last. `power` takes the root as a power, as Gemma 4 does: the two
    differ in the last bit.
    """

    def __init__(
        self,
        weight: torch.Tensor | None,
        eps: float,
        *,
        one_plus: bool = False,
        cast_first: bool = True,
        power: bool = False,
    ) -> None:
        self.weight, self.eps = weight, eps
        self.one_plus, self.cast_first, self.power = one_plus, cast_first, power
        self.sums: Summing | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        if use_kernels(x):
            return self.add(x, None)[0]
        values = x.float()
        mean_square = values.square().mean(-1, keepdim=True) + self.eps
        normed = values * (torch.pow(mean_square, -0.5) if self.power else torch.rsqrt(mean_square))
        if self.weight is None:
            return normed.to(x.dtype)
        if self.cast_first:
            return self.weight * normed.to(x.dtype)
        if self.one_plus or self.power:
            return (normed * (self.weight.float() + self.one_plus)).to(x.dtype)
        return (normed * self.weight).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual): the two steps between blocks, as one so that kernels can fuse them.

        With `sums`, x is this rank's part of a sum (see fused_sums.py) wherever there is a residual.
        """
        if self.sums is not None and residual is not None:
            variant = (self.one_plus, self.cast_first)
            return self.sums.all_reduce_add_rms_norm(x, residual, self.weight, self.eps, *variant)
        if use_kernels(x):
            variant = {"one_plus": self.one_plus, "cast_first": self.cast_first}
            return _kernel()(x, residual, self.weight, self.eps, **variant)
        total = x if residual is None else x + residual
        return self(total), total
