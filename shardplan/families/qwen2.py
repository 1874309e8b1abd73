"""Qwen2, Qwen2.5, QwQ and distills: biases on q/k/v and nowhere else, optional sliding windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config import Attention, ConfigReader, Ffn, Layer, ModelConfig
from ..partition import TensorSpec
from . import common

ARCHITECTURES = ("Qwen2ForCausalLM",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    layers = windowed_layers(reader, common.attention(reader))
    return common.model_config(config, "qwen2", layers, max_position=32768)


def windowed_layers(reader: ConfigReader, full: Attention) -> list[Layer]:
    """Full attention, but a window in `sliding_attention` layers: listed, or those from max_window_layers on."""
    count, ffn = common.num_layers(reader), Ffn(reader.count("intermediate_size"))
    window = common.window(reader, 4096) if reader.flag("use_sliding_window", False) else None
    first = int(reader.number("max_window_layers", 28))
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    kinds = reader.layer_types(count, ("full_attention", "sliding_attention"), default)
    return [Layer(ffn, replace(full, window=window if kind == "sliding_attention" else None)) for kind in kinds]


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden = model.hidden_size
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        assert layer.attention is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", layer.attention, hidden, qkv_bias=True)
        yield from common.output(f"{p}self_attn.", layer.attention, hidden)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.mlp(f"{p}mlp.", layer.ffn, hidden)
    yield from common.head(model)
