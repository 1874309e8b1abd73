"""Mistral 7B, Nemo, Small: Llama without biases and with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig, text_config
from ..partition import TensorSpec
from . import common, llama

ARCHITECTURES = ("MistralForCausalLM", "Mistral3ForConditionalGeneration")

_BIASES = {"attention_bias": False, "mlp_bias": False}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(text_config(config))
    # A key that is absent means 4096, null means full attention.
    window = reader.count("sliding_window", 4096) if reader.values.get("sliding_window", 4096) is not None else None
    layers = common.uniform_layers(reader, common.attention(reader, window=window))
    return common.model_config(config, "mistral", layers, max_position=131072)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use: Llama's, whatever the config says of biases."""
    from dataclasses import replace

    return llama.tensors(replace(model, text={**model.text, **_BIASES}))
