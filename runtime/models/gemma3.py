"""Gemma 3: norms before and after both blocks and on every query and key head, all of them scaling by 1 + w."""

from __future__ import annotations

from collections.abc import Callable

from ..layers.builder import LayerBuilder
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, SandwichLayer
from .llama import dense_mlp

NormMaker = Callable[[LayerBuilder, str], RMSNorm]


def gemma3_norm(build: LayerBuilder, name: str) -> RMSNorm:
    """(x / rms(x) * (1 + w)), cast last."""
    return build.norm(name, one_plus=True, cast_first=False)


def gemma_block(build: LayerBuilder, index: int, attention: SelfAttention, norm: NormMaker) -> SandwichLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))), under the names that Gemma 3 and 4 share."""
    p = f"model.layers.{index}."
    return SandwichLayer(
        (norm(build, f"{p}input_layernorm"), norm(build, f"{p}post_attention_layernorm")),
        attention,
        (norm(build, f"{p}pre_feedforward_layernorm"), norm(build, f"{p}post_feedforward_layernorm")),
        dense_mlp(build, index),
    )


def gemma3_layer(build: LayerBuilder, index: int) -> SandwichLayer:
    """One decoder layer; its window and rotation come from the config."""
    config = build.model.layers[index].attention
    assert config is not None
    p = f"model.layers.{index}.self_attn."
    q_norm, k_norm = gemma3_norm(build, f"{p}q_norm"), gemma3_norm(build, f"{p}k_norm")
    attention = SelfAttention(build, index, config, q_norm=q_norm, k_norm=k_norm)
    return gemma_block(build, index, attention, gemma3_norm)


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, gemma3_layer, gemma3_norm(builder, "model.norm"))
