"""Gemma 4, dense: Gemma 3's frame with norms scaled by w, values normed too, and per-layer embeddings (PLE).

Shapes: T tokens, H hidden, L layers, P width of a per-layer embedding.
"""

from __future__ import annotations

import math

import torch

from ...shardplan.config import ConfigReader
from ...shardplan.families.gemma4 import per_layer_axis
from ..batch import ForwardBatch
from ..layers.activation import ACTIVATIONS
from ..layers.builder import LayerBuilder
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, Keep, everything
from .gemma3 import gemma_block

_PER_LAYER = "gemma4 per-layer inputs"


def gemma4_norm(build: LayerBuilder, name: str) -> RMSNorm:
    """x / rms(x) * w, cast last."""
    return build.norm(name, cast_first=False, power=True)


def gemma4_attention(build: LayerBuilder, index: int) -> SelfAttention:
    """Attention of one layer; those that use another one's keys and values norm only their queries."""
    config = build.model.layers[index].attention
    assert config is not None
    p = f"model.layers.{index}.self_attn."
    q_norm = gemma4_norm(build, f"{p}q_norm")
    if config.kv_source is not None:
        return SelfAttention(build, index, config, q_norm=q_norm)
    k_norm, v_norm = gemma4_norm(build, f"{p}k_norm"), RMSNorm(None, build.model.norm_eps, power=True)
    return SelfAttention(build, index, config, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)


class PerLayerInputs:
    """What every layer is told of every token: (norm(projection of its embedding) + its per-layer embedding) / sqrt(2).

    The embeddings [V, L*P] are cut by vocabulary rows; the projection is small and whole on every rank.
    """

    def __init__(self, build: LayerBuilder) -> None:
        width = build.model.per_layer_width
        axis, _ = per_layer_axis(build.model)
        self.embed = build.lookup("model.embed_tokens_per_layer", axis, math.sqrt(width), round_scale=True)
        self.projection = build.replicated("model.per_layer_model_projection")
        self.norm = gemma4_norm(build, "model.per_layer_projection_norm")
        self.width, self.scale = width, build.model.hidden_size**-0.5

    def __call__(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """ids [T], x [T, H] -> [T, L, P]"""
        context = self.norm((self.projection(x) * self.scale).unflatten(-1, (-1, self.width)))
        return (context + self.embed(ids).view_as(context)) * 2**-0.5


class PerLayerBranch:
    """norm(up(act(gate(x)) * input)): what a layer makes of its per-layer inputs."""

    def __init__(self, build: LayerBuilder, prefix: str) -> None:
        self.gate = build.replicated(f"{prefix}per_layer_input_gate")
        self.up = build.replicated(f"{prefix}per_layer_projection")
        self.norm = gemma4_norm(build, f"{prefix}post_per_layer_input_norm")
        self.act = ACTIVATIONS[build.model.activation]

    def __call__(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """x [T, H], inputs [T, P] -> [T, H]"""
        return self.norm(self.up(self.act(self.gate(x)) * inputs))


class Gemma4Layer:
    """Gemma's block, then the per-layer branch, then the whole stream times the layer's scalar."""

    def __init__(self, build: LayerBuilder, index: int) -> None:
        p = f"model.layers.{index}."
        self.index = index
        self.block = gemma_block(build, index, gemma4_attention(build, index), gemma4_norm)
        self.branch = PerLayerBranch(build, p) if build.model.per_layer_width else None
        self.scalar = build.weights.take(f"{p}layer_scalar")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, keep: Keep = everything
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] twice -> [T, H] and nothing to add it to"""
        x, residual = self.block(x, residual, batch, keep)
        x = residual + x
        if self.branch is not None:
            x = x + self.branch(x, keep(batch.scratch[_PER_LAYER][:, self.index]))
        return x * self.scalar, None


class Gemma4Decoder(Decoder):
    """A decoder that looks up per-layer inputs along with the embeddings."""

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__(build, Gemma4Layer, gemma4_norm(build, "model.norm"))
        self.per_layer_inputs = PerLayerInputs(build) if build.model.per_layer_width else None
        reader = ConfigReader(build.model.text)
        self.placeholders: list[int] = reader.get("placeholder_token_ids", [])
        self.padding = reader.count("pad_token_id", least=0) if self.placeholders else 0

    def begin(self, batch: ForwardBatch) -> torch.Tensor:
        """The embeddings [T, H]; ids that stand for images and the like are read as padding."""
        ids = batch.token_ids
        for placeholder in self.placeholders:
            ids = torch.where(ids == placeholder, self.padding, ids)
        x = self.embed(ids)
        if self.per_layer_inputs is not None:
            batch.scratch[_PER_LAYER] = self.per_layer_inputs(ids, x)
        return x


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Gemma4Decoder(builder)
