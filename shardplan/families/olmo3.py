"""OLMo 3: OLMo 2 with sliding windows in three layers out of four, and rope settings of their own for either kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ConfigReader, Ffn, Layer, ModelConfig
from ..rope import parse_rope, rope_parameters
from . import common
from .olmo2 import tensors

__all__ = ["ARCHITECTURES", "parse", "tensors"]

ARCHITECTURES = ("Olmo3ForCausalLM",)

_KINDS = ("sliding_attention", "full_attention")
_THETA = 500000.0


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    count, ffn = common.num_layers(reader), Ffn(reader.count("intermediate_size"))
    kinds = reader.layer_types(count, _KINDS, [_KINDS[(i + 1) % 4 == 0] for i in range(count)])
    nested = {**config, "rope_scaling": None, "rope_parameters": _rope_by_kind(config), "rope_theta": None}
    rope = {"default_theta": _THETA, "float32_tables": True}
    base = common.attention(ConfigReader(nested), layer_type="full_attention", **rope)
    ropes = {kind: parse_rope(nested, base.head_dim, layer_type=kind, **rope) for kind in _KINDS}
    # A window that is null is no window.
    window = reader.count("sliding_window", 4096) if reader.values.get("sliding_window", 4096) is not None else None
    windows = {"sliding_attention": window, "full_attention": None}
    layers = [Layer(ffn, replace(base, rope=ropes[kind], window=windows[kind])) for kind in kinds]
    return common.model_config(config, "olmo3", layers, norm_eps=1e-5)


def _rope_by_kind(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings nested by layer type, as transformers resolves them.

    Older files have a flat `rope_scaling` and `rope_theta`: both are for the layers with full attention only. Flat
    `rope_parameters` are ignored.
    """
    rope_parameters(config)  # refuses settings that are no object
    given = config.get("rope_parameters") or {}
    nested = {k: dict(given[k]) if isinstance(given.get(k), Mapping) else {} for k in _KINDS}
    full = nested["full_attention"]
    full.update(config.get("rope_scaling") or {})
    if config.get("rope_theta") is not None:
        full.setdefault("rope_theta", config["rope_theta"])
    return nested
