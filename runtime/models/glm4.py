"""GLM-4 0414: norms before and after both blocks; its MLP's projections are packed in the file."""

from __future__ import annotations

from ..layers.builder import LayerBuilder
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, SandwichLayer
from .llama import dense_mlp


def glm4_layer(build: LayerBuilder, index: int) -> SandwichLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))"""
    p = f"model.layers.{index}."
    config = build.model.layers[index].attention
    assert config is not None
    return SandwichLayer(
        (build.norm(f"{p}input_layernorm"), build.norm(f"{p}post_self_attn_layernorm")),
        SelfAttention(build, index, config),
        (build.norm(f"{p}post_attention_layernorm"), build.norm(f"{p}post_mlp_layernorm")),
        dense_mlp(build, index),
    )


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, glm4_layer, builder.norm("model.norm"))
