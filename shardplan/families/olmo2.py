"""OLMo 2: norms after attention and MLP instead of before, and over all query heads, and all key heads, at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import Attention, ConfigReader, ModelConfig
from ..partition import TensorSpec, rows
from . import common

ARCHITECTURES = ("Olmo2ForCausalLM",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    layers = common.uniform_layers(reader, common.attention(reader, float32_tables=True))
    return common.model_config(config, "olmo2", layers, norm_eps=1e-5)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden, bias = model.hidden_size, ConfigReader(model.text).flag("attention_bias", False)
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        assert layer.attention is not None
        yield from common.projections(f"{p}self_attn.", layer.attention, hidden, qkv_bias=bias)
        yield from full_width_norms(f"{p}self_attn.", layer.attention)
        yield from common.output(f"{p}self_attn.", layer.attention, hidden, bias=bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.mlp(f"{p}mlp.", layer.ffn, hidden)
        yield common.norm(f"{p}post_feedforward_layernorm", hidden)
    yield from common.head(model)


def full_width_norms(prefix: str, a: Attention) -> Iterator[TensorSpec]:
    """Norm weights over all query heads [Hq*D] and all key heads [Hkv*D], cut like the heads."""
    yield TensorSpec(f"{prefix}q_norm.weight", (a.num_heads * a.head_dim,), rows(a.q_axis, a.head_dim))
    yield TensorSpec(f"{prefix}k_norm.weight", (a.num_kv_heads * a.head_dim,), rows(a.kv_axis, a.head_dim))
