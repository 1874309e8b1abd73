"""GLM-4 0414: norms before and after both blocks, half of each head rotated in neighbouring pairs, a packed MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig
from ..partition import TensorSpec
from . import common

ARCHITECTURES = ("Glm4ForCausalLM",)

_DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    text = common.settings(config, _DEFAULTS)
    reader = ConfigReader(text)
    attention = common.attention(reader, partial_rotary_factor=0.5, interleaved=True)
    layers = common.uniform_layers(reader, attention)
    return common.model_config(text, "glm4", layers, norm_eps=1.5625e-7, max_position=131072)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden, bias = model.hidden_size, ConfigReader(model.text).flag("attention_bias", True)
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        assert layer.attention is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", layer.attention, hidden, qkv_bias=bias)
        yield from common.output(f"{p}self_attn.", layer.attention, hidden)
        yield common.norm(f"{p}post_self_attn_layernorm", hidden)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.packed_mlp(f"{p}mlp.", layer.ffn, hidden)
        yield common.norm(f"{p}post_mlp_layernorm", hidden)
    yield from common.head(model)
