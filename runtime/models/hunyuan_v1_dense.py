"""HunYuan V1: Llama, with a norm on every query and key head after rotation: cached keys are normed."""

from __future__ import annotations

from ..layers.builder import LayerBuilder
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, PreNormLayer
from .llama import dense_mlp


def hunyuan_layer(build: LayerBuilder, index: int) -> PreNormLayer:
    """x += attention(norm(x)); x += mlp(norm(x))"""
    p = f"model.layers.{index}."
    config = build.model.layers[index].attention
    assert config is not None
    attention = SelfAttention(
        build,
        index,
        config,
        q_norm=build.norm(f"{p}self_attn.query_layernorm"),
        k_norm=build.norm(f"{p}self_attn.key_layernorm"),
        norm_after_rotation=True,
    )
    return PreNormLayer(
        build.norm(f"{p}input_layernorm"),
        attention,
        build.norm(f"{p}post_attention_layernorm"),
        dense_mlp(build, index),
    )


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, hunyuan_layer, builder.norm("model.norm"))
