"""What every family's forward shares: embed, layer after layer, final norm, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..batch import ForwardBatch
from ..layers.builder import LayerBuilder
from ..layers.fused_sums import leave_sums_to_norms
from ..layers.norm import RMSNorm

Keep = Callable[[torch.Tensor], torch.Tensor]
"""Of tensors [T, H] the rows that are of use after the mixing."""


class LayerForward(Protocol):
    """One layer."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, keep: Keep = ..., /
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] twice -> [T, H] twice: x is still to be added to the residual, if there is one.

        Of what `keep` drops, the last layer needs keys and values only.
        """
        ...


Mixer = Callable[[torch.Tensor, ForwardBatch], torch.Tensor]
"""What mixes tokens, [T, H] -> [T, H]: attention, or what stands in for it."""

FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""What works on single tokens, [T, H] -> [T, H]: an MLP, or a mixture of experts."""


def everything(x: torch.Tensor) -> torch.Tensor:
    """What all layers but the last one keep."""
    return x


class PreNormLayer:
    """x += mixer(norm(x)); x += mlp(norm(x))"""

    def __init__(self, mixer_norm: RMSNorm, mixer: Mixer, mlp_norm: RMSNorm, mlp: FeedForward) -> None:
        self.mixer_norm, self.mixer, self.mlp_norm, self.mlp = mixer_norm, mixer, mlp_norm, mlp

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, keep: Keep = everything
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] twice -> [T, H] twice"""
        x, residual = self.mixer_norm.add(x, residual)
        x, residual = self.mlp_norm.add(keep(self.mixer(x, batch)), keep(residual))
        return self.mlp(x), residual


class PostNormLayer:
    """x += norm(mixer(x)); x += norm(mlp(x)): the norms come after the sum over ranks"""

    def __init__(self, mixer: Mixer, mixer_norm: RMSNorm, mlp: FeedForward, mlp_norm: RMSNorm) -> None:
        self.mixer, self.mixer_norm, self.mlp, self.mlp_norm = mixer, mixer_norm, mlp, mlp_norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, keep: Keep = everything
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] twice -> [T, H] twice"""
        x = x if residual is None else x + residual
        x = keep(x) + self.mixer_norm(keep(self.mixer(x, batch)))
        return self.mlp_norm(self.mlp(x)), x


class SandwichLayer:
    """x += norm(mixer(norm(x))); x += norm(mlp(norm(x))): the outer norms come after the sum over ranks"""

    def __init__(
        self, mixer_norms: tuple[RMSNorm, RMSNorm], mixer: Mixer, mlp_norms: tuple[RMSNorm, RMSNorm], mlp: FeedForward
    ) -> None:
        self.before_mixer, self.after_mixer = mixer_norms
        self.before_mlp, self.after_mlp = mlp_norms
        self.mixer, self.mlp = mixer, mlp

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, keep: Keep = everything
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] twice -> [T, H] twice"""
        x, residual = self.before_mixer.add(x, residual)
        x = self.after_mixer(keep(self.mixer(x, batch)))
        x, residual = self.before_mlp.add(x, keep(residual))
        return self.after_mlp(self.mlp(x)), residual


class Decoder:
    """A stack of layers between embedding and head."""

    def __init__(
        self, build: LayerBuilder, make_layer: Callable[[LayerBuilder, int], LayerForward], norm: RMSNorm
    ) -> None:
        self.embed = build.embedding()
        self.layers = [make_layer(build, i) for i in range(len(build.model.layers))]
        self.norm = norm
        self.head = build.head(self.embed)
        pre_norm = [layer for layer in self.layers if isinstance(layer, PreNormLayer)]
        if len(pre_norm) == len(self.layers):
            leave_sums_to_norms(pre_norm, norm, build.communicator)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """The logits [L, V] of the batch's logit rows."""
        x, residual = self.begin(batch), None
        *before, last = self.layers
        for layer in before:
            x, residual = layer(x, residual, batch)
        x, residual = last(x, residual, batch, batch.logit_rows_of)
        return self.head(self.norm.add(x, residual)[0])

    def begin(self, batch: ForwardBatch) -> torch.Tensor:
        """What the first layer works on: the embeddings [T, H] of the batch's tokens."""
        return self.embed(batch.token_ids)
