"""Qwen3.5, dense: gated delta nets in most layers, gated attention in the others (Yang et al. 2024 for the delta net).

Shapes: Hk/Hv key and value heads of a delta net, dk/dv their dimensions, K its convolution's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigReader, DeltaNet, Ffn, Layer, ModelConfig
from ..errors import CheckpointError
from ..partition import TensorSpec, columns, rows, segmented
from . import common

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")

_DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError."""
    text = common.settings(config, _DEFAULTS)
    reader = ConfigReader(text)
    reader.refuse("attn_output_gate", unless=True)
    attention = common.attention(reader, partial_rotary_factor=0.25)
    net, ffn, count = _delta_net(reader), Ffn(reader.count("intermediate_size")), common.num_layers(reader)
    interval = reader.count("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    kinds = reader.layer_types(count, ("linear_attention", "full_attention"), default)
    layers = [Layer(ffn, attention) if k == "full_attention" else Layer(ffn, delta_net=net) for k in kinds]
    return common.model_config(text, "qwen3_5", layers, max_position=32768)


def _delta_net(reader: ConfigReader) -> DeltaNet:
    net = DeltaNet(
        num_key_heads=reader.count("linear_num_key_heads", 16),
        num_value_heads=reader.count("linear_num_value_heads", 32),
        key_dim=reader.count("linear_key_head_dim", 128),
        value_dim=reader.count("linear_value_head_dim", 128),
        conv_kernel=reader.count("linear_conv_kernel_dim", 4),
    )
    if net.num_value_heads % net.num_key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {net.num_value_heads} is not a multiple of linear_num_key_heads "
            f"{net.num_key_heads}",
            "fix config.json",
        )
    return net


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    hidden, bias = model.hidden_size, ConfigReader(model.text).flag("attention_bias", False)
    yield common.embedding(model)
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        yield common.norm(f"{p}input_layernorm", hidden)
        if layer.delta_net is not None:
            yield from delta_net(f"{p}linear_attn.", layer.delta_net, hidden)
        else:
            a = layer.attention
            assert a is not None
            yield from common.projections(f"{p}self_attn.", a, hidden, qkv_bias=bias, gated=True)
            yield common.norm(f"{p}self_attn.q_norm", a.head_dim)
            yield common.norm(f"{p}self_attn.k_norm", a.head_dim)
            yield from common.output(f"{p}self_attn.", a, hidden, bias=bias)
        yield common.norm(f"{p}post_attention_layernorm", hidden)
        yield from common.mlp(f"{p}mlp.", layer.ffn, hidden)
    yield from common.head(model)


def delta_net(prefix: str, net: DeltaNet, hidden: int) -> Iterator[TensorSpec]:
    """A gated delta net's tensors. What is packed as [q heads | k heads | v heads] is cut in each of its three parts.

    The four input projections lie one after another: [2 Hk*dk + Hv*dv | Hv*dv | Hv | Hv, H].
    """
    heads, width = net.num_value_heads, net.num_value_heads * net.value_dim
    channels = 2 * net.num_key_heads * net.key_dim + width
    k, v = ("delta_k_heads", net.key_dim), ("delta_v_heads", net.value_dim)
    sizes = {"delta_k_heads": net.num_key_heads, "delta_v_heads": heads}
    packed, each = segmented(0, k, k, v, sizes=sizes), rows("delta_v_heads")
    projections = (("qkv", channels, packed), ("z", width, rows(*v)), ("b", heads, each), ("a", heads, each))
    for name, size, cut in projections:
        yield TensorSpec(f"{prefix}in_proj_{name}.weight", (size, hidden), cut, f"{prefix}in_proj")
    yield TensorSpec(f"{prefix}conv1d.weight", (channels, 1, net.conv_kernel), packed)
    yield TensorSpec(f"{prefix}A_log", (heads,), each)
    yield TensorSpec(f"{prefix}dt_bias", (heads,), each)
    yield common.norm(f"{prefix}norm", net.value_dim)
    yield TensorSpec(f"{prefix}out_proj.weight", (hidden, width), columns(*v))
