"""OLMo 2: norms after attention and MLP, and over all query heads and all key heads of a token."""

from __future__ import annotations

from ..layers.builder import LayerBuilder
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, PostNormLayer


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, _layer, builder.norm("model.norm", cast_first=False))


def _layer(build: LayerBuilder, index: int) -> PostNormLayer:
    p = f"model.layers.{index}."
    attention = build.model.layers[index].attention
    assert attention is not None
    return PostNormLayer(
        SelfAttention(build, index, attention, full_norm=build.full_width_norm(f"{p}self_attn.", attention)),
        build.norm(f"{p}post_attention_layernorm", cast_first=False),
        build.mlp(f"{p}mlp."),
        build.norm(f"{p}post_feedforward_layernorm", cast_first=False),
    )
