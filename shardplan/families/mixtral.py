"""Mixtral: Mistral's attention and a mixture of experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, Layer, ModelConfig
from ..partition import TensorSpec
from . import common

ARCHITECTURES = ("MixtralForCausalLM",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    attention = common.attention(reader, window=common.window(reader, None), default_theta=1e6)
    num_experts = reader.count("num_local_experts", reader.count("num_experts", 8))
    experts = common.expert_ffn(reader.count("intermediate_size"), num_experts, reader.count("num_experts_per_tok", 2))
    layers = [Layer(experts, attention)] * common.num_layers(reader)
    return common.model_config(config, "mixtral", layers, norm_eps=1e-5, max_position=131072)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden = model.hidden_size
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        assert layer.attention is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", layer.attention, hidden)
        yield from common.output(f"{p}self_attn.", layer.attention, hidden)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.mixture(model, p, layer.ffn, "block_sparse_moe", ("w1", "w3", "w2"))
    yield from common.head(model)
