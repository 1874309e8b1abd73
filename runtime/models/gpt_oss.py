"""gpt-oss: pre-norm attention with sinks, and a mixture of experts whose gate and up columns alternate."""

from __future__ import annotations

from functools import partial

from ...shardplan.config import ConfigReader
from ..layers.activation import ClampedSwiGLU
from ..layers.builder import LayerBuilder
from ..layers.moe import Experts, MixtureOfExperts, Router, top_k_then_softmax
from ..layers.self_attention import SelfAttention
from .decoder import Decoder, PreNormLayer


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, _layer, builder.norm("model.norm", cast_first=False))


def _layer(build: LayerBuilder, index: int) -> PreNormLayer:
    p = f"model.layers.{index}."
    attention = build.model.layers[index].attention
    assert attention is not None
    return PreNormLayer(
        build.norm(f"{p}input_layernorm", cast_first=False),
        SelfAttention(build, index, attention, sinks=build.weights.take(f"{p}self_attn.sinks")),
        build.norm(f"{p}post_attention_layernorm", cast_first=False),
        _experts(build, index),
    )


def _experts(build: LayerBuilder, index: int) -> MixtureOfExperts:
    """The checkpoint stacks all experts of a layer in one tensor, inputs before outputs: views turn them around."""
    p, take, reader = f"model.layers.{index}.mlp.", build.weights.take, ConfigReader(build.model.text)
    pick = partial(top_k_then_softmax, k=build.model.layers[index].ffn.experts_per_token)
    activation = ClampedSwiGLU(reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0))
    gate_up, down = (take(f"{p}experts.{name}_proj").transpose(1, 2) for name in ("gate_up", "down"))
    return MixtureOfExperts(
        Router(take(f"{p}router.weight"), take(f"{p}router.bias"), pick),
        Experts(gate_up, down, activation, take(f"{p}experts.gate_up_proj_bias")),
        build.communicator,
        down_bias=take(f"{p}experts.down_proj_bias"),
    )
