"""Qwen3 with a mixture of experts: Qwen3's attention, and experts in place of most MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, Ffn, Layer, ModelConfig
from ..errors import CheckpointError
from ..partition import TensorSpec
from ..values import shown
from . import common

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader(config)
    # The window, where it is used at all, is that of every layer.
    window = common.window(reader, 4096) if reader.flag("use_sliding_window", False) else None
    attention = common.attention(reader, window=window)
    num_experts = reader.count("num_experts", reader.count("num_local_experts", 128))
    experts = common.expert_ffn(
        reader.count("moe_intermediate_size", 768), num_experts, reader.count("num_experts_per_tok", 8)
    )
    dense, step = Ffn(reader.count("intermediate_size", 6144)), reader.count("decoder_sparse_step", 1)
    mlp_only = reader.get("mlp_only_layers", [])
    if not isinstance(mlp_only, list) or not all(type(i) is int for i in mlp_only):
        raise CheckpointError(f"config.json: mlp_only_layers is {shown(mlp_only)}, must list layers", "fix config.json")
    layers = [
        Layer(dense if i in mlp_only or (i + 1) % step else experts, attention)
        for i in range(common.num_layers(reader))
    ]
    return common.model_config(config, "qwen3_moe", layers, max_position=32768)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden, bias = model.hidden_size, ConfigReader(model.text).flag("attention_bias", False)
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        a, ffn = layer.attention, layer.ffn
        assert a is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", a, hidden, qkv_bias=bias)
        yield common.norm(f"{p}self_attn.q_norm", a.head_dim)
        yield common.norm(f"{p}self_attn.k_norm", a.head_dim)
        yield from common.output(f"{p}self_attn.", a, hidden, bias=bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        if ffn.num_experts:
            yield from common.mixture(model, p, ffn, "mlp", ("gate_proj", "up_proj", "down_proj"))
        else:
            yield from common.mlp(f"{p}mlp.", ffn, hidden)
    yield from common.head(model)
