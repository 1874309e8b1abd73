"""Llama: pre-norm attention and MLP."""

from __future__ import annotations

import torch

from ..batch import ForwardBatch
from ..layers.builder import LayerBuilder
from ..layers.self_attention import SelfAttention
from .decoder import Decoder


class LlamaLayer:
    """x += attention(norm(x)); x += mlp(norm(x))"""

    def __init__(self, build: LayerBuilder, index: int, *, head_norms: bool = False) -> None:
        p = f"model.layers.{index}."
        config = build.model.layers[index].attention
        assert config is not None
        self.input_layernorm = build.norm(f"{p}input_layernorm")
        norms = {n: build.norm(f"{p}self_attn.{n}") for n in ("q_norm", "k_norm")} if head_norms else {}
        self.self_attn = SelfAttention(build, index, config, **norms)
        self.post_attention_layernorm = build.norm(f"{p}post_attention_layernorm")
        self.mlp = build.mlp(f"{p}mlp.")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] twice -> [T, H] twice"""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, batch)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, LlamaLayer, builder.norm("model.norm"))
