"""ERNIE 4.5, dense: Llama with rotation in neighbouring pairs, and one switch for every bias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig
from ..partition import TensorSpec
from . import common, llama

# The second name is that of the first files on the hub, which came with their own code.
ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")

_DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    text = common.settings(config, _DEFAULTS)
    reader = ConfigReader(text)
    attention = common.attention(reader, default_theta=500000.0, interleaved=True, in_float32=True)
    layers = common.uniform_layers(reader, attention)
    return common.model_config(text, "ernie4_5", layers, norm_eps=1e-5, tie=True, max_position=131072)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use: Llama's."""
    bias = ConfigReader(model.text).flag("use_bias", False)
    return llama.plain_tensors(model, attention_bias=bias, mlp_bias=bias)
