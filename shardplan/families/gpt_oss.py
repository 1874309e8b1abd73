"""gpt-oss in float weights: attention sinks, windows in every other layer, and experts stored as stacked tensors.

Shapes: E experts, I their width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config import ConfigReader, Ffn, Layer, ModelConfig
from ..partition import Cut, Segment, TensorSpec, columns, rows
from . import common

ARCHITECTURES = ("GptOssForCausalLM",)

_KINDS = ("sliding_attention", "full_attention")
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    reader = ConfigReader({"rope_parameters": _ROPE} | {k: v for k, v in config.items() if v is not None})
    full = common.attention(reader, head_dim=64, default_theta=150000.0)
    count = common.num_layers(reader)
    kinds = reader.layer_types(count, _KINDS, [_KINDS[i % 2] for i in range(count)])
    window = common.window(ConfigReader(config), 128)
    attention = {"sliding_attention": replace(full, window=window), "full_attention": full}
    num_experts = reader.count("num_local_experts", reader.count("num_experts", 128))
    experts = common.expert_ffn(reader.count("intermediate_size"), num_experts, reader.count("num_experts_per_tok", 4))
    layers = [Layer(experts, attention[kind]) for kind in kinds]
    return common.model_config(config, "gpt_oss", layers, norm_eps=1e-5, max_position=131072)


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden, bias = model.hidden_size, ConfigReader(model.text).flag("attention_bias", True)
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        a = layer.attention
        assert a is not None
        yield common.norm(f"{p}input_layernorm", hidden)
        yield from common.projections(f"{p}self_attn.", a, hidden, qkv_bias=bias)
        yield TensorSpec(f"{p}self_attn.sinks", (a.num_heads,), rows(a.q_axis))
        yield from common.output(f"{p}self_attn.", a, hidden, bias=bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield TensorSpec(f"{p}mlp.router.weight", (layer.ffn.num_experts, hidden))
        yield TensorSpec(f"{p}mlp.router.bias", (layer.ffn.num_experts,))
        yield from stacked_experts(f"{p}mlp.experts.", layer.ffn, hidden)
    yield from common.head(model)


def stacked_experts(prefix: str, ffn: Ffn, hidden: int) -> Iterator[TensorSpec]:
    """All experts of a layer in four tensors, inputs before outputs.

    Each of the I columns of gate and up is a pair of neighbours, [gate, up]; down's bias stays whole.
    """
    num, size = ffn.num_experts, ffn.size
    yield TensorSpec(f"{prefix}gate_up_proj", (num, hidden, 2 * size), Cut(2, (Segment(ffn.axis, 2),)))
    yield TensorSpec(f"{prefix}gate_up_proj_bias", (num, 2 * size), columns(ffn.axis, 2))
    yield TensorSpec(f"{prefix}down_proj", (num, size, hidden), columns(ffn.axis))
    yield TensorSpec(f"{prefix}down_proj_bias", (num, hidden))
