"""Granite 3, dense: Llama with constants on the embeddings, the attention scores, the residual branches and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig, Scales
from . import common
from .llama import tensors

__all__ = ["ARCHITECTURES", "parse", "tensors"]

ARCHITECTURES = ("GraniteForCausalLM",)

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    text = common.settings(config, _DEFAULTS)
    reader = ConfigReader(text)
    attention = common.attention(reader, scaling=reader.number("attention_multiplier", 1.0))
    scales = Scales(
        embedding=reader.number("embedding_multiplier", 1.0),
        residual=reader.number("residual_multiplier", 1.0),
        logit_divisor=reader.positive("logits_scaling", 1.0),
    )
    return common.model_config(text, "granite", common.uniform_layers(reader, attention), scales=scales)
