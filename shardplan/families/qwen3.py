"""Qwen3, dense: a norm on every query and key head, optional biases and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig
from ..partition import TensorSpec
from . import common, qwen2

ARCHITECTURES = ("Qwen3ForCausalLM",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    layers = qwen2.windowed_layers(reader, common.attention(reader, head_dim=128))
    return common.model_config(config, "qwen3", layers, max_position=32768)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden, bias = model.hidden_size, ConfigReader(model.text).flag("attention_bias", False)
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        a = layer.attention
        assert a is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", a, hidden, qkv_bias=bias)
        yield common.norm(f"{p}self_attn.q_norm", a.head_dim)
        yield common.norm(f"{p}self_attn.k_norm", a.head_dim)
        yield from common.output(f"{p}self_attn.", a, hidden, bias=bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.mlp(f"{p}mlp.", layer.ffn, hidden)
    yield from common.head(model)
