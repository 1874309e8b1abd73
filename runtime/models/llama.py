"""Llama: pre-norm attention and MLP."""

from __future__ import annotations

from collections.abc import Callable

from ..layers.builder import LayerBuilder
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, FeedForward, PreNormLayer


def dense_mlp(build: LayerBuilder, index: int) -> FeedForward:
    """The gated MLP of layer `index`."""
    return build.mlp(f"model.layers.{index}.mlp.")


class LlamaLayer(PreNormLayer):
    """x += attention(norm(x)); x += mlp(norm(x))"""

    def __init__(
        self,
        build: LayerBuilder,
        index: int,
        *,
        head_norms: bool = False,
        make_mlp: Callable[[LayerBuilder, int], FeedForward] = dense_mlp,
    ) -> None:
        p = f"model.layers.{index}."
        config = build.model.layers[index].attention
        assert config is not None
        q_norm, k_norm = (build.norm(f"{p}self_attn.{n}") if head_norms else None for n in ("q_norm", "k_norm"))
        super().__init__(
            build.norm(f"{p}input_layernorm"),
            SelfAttention(build, index, config, q_norm=q_norm, k_norm=k_norm),
            build.norm(f"{p}post_attention_layernorm"),
            make_mlp(build, index),
        )


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, LlamaLayer, builder.norm("model.norm"))
