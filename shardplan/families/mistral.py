"""Mistral 7B, Nemo, Small: Llama without biases and with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig, text_config
from ..partition import TensorSpec
from . import common, llama

ARCHITECTURES = ("MistralForCausalLM", "Mistral3ForConditionalGeneration")


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(text_config(config))
    layers = common.uniform_layers(reader, common.attention(reader, window=common.window(reader, 4096)))
    return common.model_config(config, "mistral", layers, max_position=131072)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use: Llama's, whatever the config says of biases."""
    return llama.plain_tensors(model, attention_bias=False, mlp_bias=False)
