"""Llama 2, 3, 3.1, 3.2 and their many derivatives: pre-norm, no q/k norms, optional biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig
from ..partition import TensorSpec
from . import common

ARCHITECTURES = ("LlamaForCausalLM",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    return common.model_config(config, "llama", common.uniform_layers(reader, common.attention(reader)))


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    reader = ConfigReader(model.text)
    return plain_tensors(
        model, attention_bias=reader.flag("attention_bias", False), mlp_bias=reader.flag("mlp_bias", False)
    )


def plain_tensors(model: ModelConfig, *, attention_bias: bool, mlp_bias: bool) -> Iterator[TensorSpec]:
    """The tensors of a pre-norm decoder without q/k norms; biases are on all projections of a block or on none."""
    hidden = model.hidden_size
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        assert layer.attention is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", layer.attention, hidden, qkv_bias=attention_bias)
        yield from common.output(f"{p}self_attn.", layer.attention, hidden, bias=attention_bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.mlp(f"{p}mlp.", layer.ffn, hidden, bias=mlp_bias)
    yield from common.head(model)
