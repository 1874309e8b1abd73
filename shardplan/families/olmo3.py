"""OLMo 3: OLMo 2 with sliding windows in three layers out of four, and rope settings of their own for either kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ConfigReader, Ffn, Layer, ModelConfig
from . import common
from .olmo2 import tensors

__all__ = ["ARCHITECTURES", "parse", "tensors"]

ARCHITECTURES = ("Olmo3ForCausalLM",)

_KINDS = ("sliding_attention", "full_attention")
_THETAS = {"sliding_attention": (None, 500000.0), "full_attention": ("rope_theta", 500000.0)}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    count, ffn = common.num_layers(reader), Ffn(reader.count("intermediate_size"))
    kinds = reader.layer_types(count, _KINDS, [_KINDS[(i + 1) % 4 == 0] for i in range(count)])
    base = common.attention(reader)
    ropes = common.ropes_by_layer_type(config, base.head_dim, _THETAS, float32_tables=True)
    window = common.window(reader, 4096)
    windows = {"sliding_attention": window, "full_attention": None}
    layers = [Layer(ffn, replace(base, rope=ropes[kind], window=windows[kind])) for kind in kinds]
    return common.model_config(config, "olmo3", layers, norm_eps=1e-5)
