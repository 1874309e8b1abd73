"""Phi-3, Phi-3.5 mini, Phi-4, Phi-4 mini: Llama with packed projections, partial rotation and longrope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig
from ..errors import CheckpointError
from ..partition import TensorSpec
from ..rope import rope_parameters
from ..values import shown
from . import common

ARCHITECTURES = ("Phi3ForCausalLM",)

_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    text = common.settings(config, _DEFAULTS)
    reader = ConfigReader(text)
    attention = common.attention(
        ConfigReader({**text, "rope_scaling": None, "rope_parameters": _rope(text)}),
        window=common.window(reader, None),
        partial_rotary_factor=1.0,
    )
    return common.model_config(text, "phi3", common.uniform_layers(reader, attention), norm_eps=1e-5)


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings; early files call longrope by other names."""
    params = dict(rope_parameters(text))
    kind = params.get("rope_type") or params.get("type") or "default"
    kind = "longrope" if kind in ("su", "yarn") else kind
    if kind not in ("default", "longrope"):
        raise CheckpointError(f"rope_type is {shown(kind)}, which Phi-3 does not have", "supported: default, longrope")
    return {**params, "rope_type": kind}


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden = model.hidden_size
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        assert layer.attention is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.packed_projections(f"{p}self_attn.", layer.attention, hidden)
        yield from common.output(f"{p}self_attn.", layer.attention, hidden)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.packed_mlp(f"{p}mlp.", layer.ffn, hidden)
    yield from common.head(model)
