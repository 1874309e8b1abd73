"""HunYuan V1, dense: Llama with a norm on every query and key head after rotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, ModelConfig
from ..partition import TensorSpec
from . import common

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM",)

_DEFAULTS = {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    text = common.settings(config, _DEFAULTS)
    reader = ConfigReader(text)
    reader.refuse("use_cla", False)
    reader.refuse("use_qk_norm", True)
    # Tencent's own files call the head dimension attention_head_dim.
    attention = common.attention(reader, head_dim=reader.get("attention_head_dim"), static_alpha=True)
    return common.model_config(text, "hunyuan_v1_dense", common.uniform_layers(reader, attention), norm_eps=1e-5)


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
        yield common.norm(f"{p}self_attn.query_layernorm", a.head_dim)
        yield common.norm(f"{p}self_attn.key_layernorm", a.head_dim)
        yield from common.output(f"{p}self_attn.", a, hidden, bias=bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.mlp(f"{p}mlp.", layer.ffn, hidden)
    yield from common.head(model)
