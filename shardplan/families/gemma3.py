"""Gemma 3, the text model: norms before and after both blocks, sliding windows with a rotation of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config import ConfigReader, Ffn, Layer, ModelConfig, Scales
from ..partition import TensorSpec
from . import common

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

SLIDING, FULL = "sliding_attention", "full_attention"

_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    text = common.settings(config, _DEFAULTS)
    reader = ConfigReader(text)
    reader.refuse("use_bidirectional_attention", False)
    ropes = common.ropes_by_layer_type(
        text, reader.count("head_dim"), {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
    )
    base = common.attention(reader, scaling=reader.positive("query_pre_attn_scalar", 256) ** -0.5)
    window, ffn = common.window(reader, 4096), Ffn(reader.count("intermediate_size"))
    layers = [
        Layer(ffn, replace(base, rope=ropes[kind], window=window if kind == SLIDING else None))
        for kind in _layer_types(reader)
    ]
    activation = reader.activation("hidden_activation", "gelu_pytorch_tanh")
    return common.model_config(
        text, "gemma3", layers, tie=True, max_position=131072, activation=activation, scales=_scales(reader)
    )


def _layer_types(reader: ConfigReader) -> list[str]:
    """The listed kinds of layers, or full attention in every `sliding_window_pattern`-th."""
    count, pattern = common.num_layers(reader), reader.count("sliding_window_pattern", 6)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(count)]
    return reader.layer_types(count, (SLIDING, FULL), default)


def _scales(reader: ConfigReader) -> Scales:
    """Embeddings times sqrt(hidden), a factor of the weights' dtype; a cap on the logits of the text class only."""
    embedding = math.sqrt(reader.count("hidden_size"))
    # The multimodal class has the setting but does not apply it.
    text_only = reader.get("architectures") == ["Gemma3ForCausalLM"]
    return Scales(embedding, round_embedding=True, logit_softcap=common.softcap(reader) if text_only else None)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden, bias = model.hidden_size, ConfigReader(model.text).flag("attention_bias", False)
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        a = layer.attention
        assert a is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", a, hidden, qkv_bias=bias)
        yield common.norm(f"{p}self_attn.q_norm", a.head_dim)
        yield common.norm(f"{p}self_attn.k_norm", a.head_dim)
        yield from common.output(f"{p}self_attn.", a, hidden, bias=bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield common.norm(f"{p}pre_feedforward_layernorm", hidden)
        yield from common.mlp(f"{p}mlp.", layer.ffn, hidden)
        yield common.norm(f"{p}post_feedforward_layernorm", hidden)
    yield from common.head(model)
