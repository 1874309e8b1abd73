"""Qwen3.5: pre-norm layers of gated delta nets and, every few layers, gated attention; norms scale by 1 + w."""

from __future__ import annotations

from ..layers.builder import LayerBuilder
from ..layers.delta_net import GatedDeltaNet
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, Mixer, PreNormLayer


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, _layer, _norm(builder, "model.norm"))


def _layer(build: LayerBuilder, index: int) -> PreNormLayer:
    p = f"model.layers.{index}."
    return PreNormLayer(
        _norm(build, f"{p}input_layernorm"),
        _mixer(build, index),
        _norm(build, f"{p}post_attention_layernorm"),
        build.mlp(f"{p}mlp."),
    )


def _mixer(build: LayerBuilder, index: int) -> Mixer:
    layer, p = build.model.layers[index], f"model.layers.{index}.self_attn."
    if layer.delta_net is not None:
        return GatedDeltaNet(build, index, layer.delta_net)
    assert layer.attention is not None
    q_norm, k_norm = _norm(build, f"{p}q_norm"), _norm(build, f"{p}k_norm")
    return SelfAttention(build, index, layer.attention, q_norm=q_norm, k_norm=k_norm, gated=True)


def _norm(build: LayerBuilder, name: str) -> RMSNorm:
    return build.norm(name, one_plus=True, cast_first=False)
