"""Gemma 4, dense text models: Gemma 3's frame, with head sizes by layer type, shared keys and values, and a small
embedding of every token for every layer (per-layer embeddings, PLE).

Shapes: V vocabulary, H hidden, L layers, P width of a per-layer embedding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config import Attention, ConfigReader, Ffn, Layer, ModelConfig, Scales
from ..errors import CheckpointError
from ..partition import TensorSpec, rows
from ..rope import parse_rope
from ..values import shown
from . import common
from .gemma3 import FULL, SLIDING

_UNIFIED = ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration")

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", *_UNIFIED)

_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "pad_token_id": 0,
}

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}

_PLACEHOLDERS = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes; raises CheckpointError.

    In `text`, placeholder_token_ids are the ids that a multimodal model reads as padding.
    """
    text = {**common.settings(config, _DEFAULTS), "placeholder_token_ids": _placeholders(config)}
    unified = common.architecture(config) in _UNIFIED
    reader = ConfigReader(text)
    if text["placeholder_token_ids"] and reader.count("pad_token_id", least=0) >= reader.count("vocab_size"):
        raise CheckpointError(f"config.json: pad_token_id {text['pad_token_id']} is no token's id", "fix config.json")
    width = 0 if unified else reader.count("hidden_size_per_layer_input", 256, least=0)
    reader.refuse("enable_moe_block", False)
    if reader.get("use_bidirectional_attention") != "vision":  # which changes nothing for text
        reader.refuse("use_bidirectional_attention")
    scales = Scales(math.sqrt(reader.count("hidden_size")), round_embedding=True, logit_softcap=common.softcap(reader))
    return common.model_config(
        {**text, "per_layer_config": None},  # which is in the layers now
        "gemma4",
        _layers(reader, 1024 if unified else 512),
        tie=True,
        max_position=262144 if unified else 131072,
        activation=reader.activation("hidden_activation", "gelu_pytorch_tanh"),
        scales=scales,
        extra_axes=_per_layer_axes(reader) if width else (),
        per_layer_width=width,
    )


def _placeholders(config: Mapping[str, Any]) -> list[int]:
    """Ids that stand for images, videos and sound in a multimodal model."""
    if not isinstance(config.get("text_config"), Mapping):
        return []
    outer = ConfigReader(config)
    return [outer.count(key, default, least=0) for key, default in _PLACEHOLDERS.items()]


def _layers(reader: ConfigReader, default_window: int) -> list[Layer]:
    """All layers. The last ones may use the keys and values of the last layer of their type that has its own."""
    kinds = _layer_types(reader)
    by_kind = _attention_by_kind(reader, kinds, default_window)
    first_shared = len(kinds) - reader.count("num_kv_shared_layers", 0, least=0)
    own = {kind: i for i, kind in enumerate(kinds[: max(first_shared, 0)])}
    size, wide = reader.count("intermediate_size"), reader.flag("use_double_wide_mlp", False)
    layers = []
    for i, kind in enumerate(kinds):
        attention, ffn = by_kind[kind], Ffn(size)
        if i >= first_shared:
            if kind not in own:
                raise CheckpointError(
                    f"config.json: num_kv_shared_layers leaves no {kind} layer with keys of its own", "fix config.json"
                )
            attention = replace(attention, kv_source=own[kind], keys_as_values=False)
            ffn = Ffn(2 * size, "wide_ffn") if wide else ffn
        layers.append(Layer(ffn, attention))
    return layers


def _layer_types(reader: ConfigReader) -> list[str]:
    """The listed kinds of layers, or full attention in every 6th; the last layer is full in any case."""
    count = common.num_layers(reader)
    default = [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    return [*reader.layer_types(count, (SLIDING, FULL), default)[:-1], FULL]


def _attention_by_kind(reader: ConfigReader, kinds: list[str], default_window: int) -> dict[str, Attention]:
    """The attention of either layer type. Where their kv head counts differ, so do their heads' shares: two axes."""
    shapes = {kind: _shape(reader, kind, kinds) for kind in dict.fromkeys(kinds)}
    num_heads, same_as = reader.count("num_attention_heads"), shapes[kinds[0]][0]
    window = common.window(reader, default_window) if SLIDING in kinds else None
    found = {}
    for kind, (num_kv_heads, head_dim) in shapes.items():
        common.check_groups(num_heads, num_kv_heads)
        prefix = "" if num_kv_heads == same_as else "global_"
        found[kind] = Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scaling=1.0,
            rope=parse_rope(_ropes(reader), head_dim, layer_type=kind),
            window=window if kind == SLIDING else None,
            q_axis=f"{prefix}q_heads",
            kv_axis=f"{prefix}kv_heads",
            keys_as_values=kind == FULL and reader.flag("attention_k_eq_v", False),
        )
    return found


def _shape(reader: ConfigReader, kind: str, kinds: list[str]) -> tuple[int, int]:
    """(kv heads, head dimension) of one layer type, in either of two spellings.

    `per_layer_config` (transformers 5) lists, by layer index, what deviates from the general values. Without it,
    `global_head_dim` and `num_global_key_value_heads` are those of full layers, the latter only for k-equals-v models.
    """
    general = {"num_key_value_heads": reader.count("num_key_value_heads"), "head_dim": reader.count("head_dim")}
    if "per_layer_config" in reader.values:
        deviating = _per_layer_config(reader, len(kinds))
        each = [{**general, **deviating.get(i, {})} for i, k in enumerate(kinds) if k == kind]
        if any(shape != each[0] for shape in each):
            raise CheckpointError(
                f"per_layer_config: layers of type {kind} differ from one another", "this variant is not supported"
            )
        shape = ConfigReader(each[0])
    elif kind == FULL:
        num_kv_heads = general["num_key_value_heads"]
        if reader.flag("attention_k_eq_v", False):
            num_kv_heads = reader.count("num_global_key_value_heads", num_kv_heads)
        return num_kv_heads, reader.count("global_head_dim", 512)
    else:
        shape = ConfigReader(general)
    return shape.count("num_key_value_heads"), shape.count("head_dim")


def _per_layer_config(reader: ConfigReader, num_layers: int) -> dict[int, Mapping[str, Any]]:
    """`per_layer_config` by layer index; its keys may be padded with zeros."""
    value = reader.get("per_layer_config", {})
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise CheckpointError(f"config.json: per_layer_config is {shown(value)}, must map layers to settings", "fix it")
    found = {}
    for key, deviating in value.items():
        if not re.fullmatch(r"[0-9]{1,6}", str(key)) or int(key) >= num_layers:
            raise CheckpointError(f"config.json: per_layer_config names layer {shown(key)}", "fix config.json")
        for name in deviating:
            if name not in ("head_dim", "num_key_value_heads"):
                raise CheckpointError(
                    f"per_layer_config: {shown(name)} by layer is not supported", "this variant cannot be run yet"
                )
        found[int(key)] = deviating
    return found


def _ropes(reader: ConfigReader) -> dict[str, Any]:
    """The settings with rope parameters nested by layer type, which is the only form that Gemma 4 knows."""
    ropes = reader.get("rope_parameters", _ROPES)
    if not isinstance(ropes, Mapping) or not all(isinstance(ropes.get(kind), Mapping) for kind in _ROPES):
        raise CheckpointError(
            f"config.json: rope_parameters is {shown(ropes)}, must have an object for each of {', '.join(_ROPES)}",
            "take config.json from the model's repository",
        )
    return {**reader.values, "rope_parameters": ropes, "rope_scaling": None, "rope_theta": None}


def _per_layer_axes(reader: ConfigReader) -> tuple[tuple[str, int], ...]:
    """The vocabulary of per-layer embeddings as a model axis of its own, where it is not that of the tokens."""
    rows_of_tokens, vocab = reader.count("vocab_size_per_layer_input", 262144), reader.count("vocab_size")
    if rows_of_tokens < vocab:
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input {rows_of_tokens} is less than vocab_size {vocab}",
            "fix config.json",
        )
    return (("per_layer_vocab", rows_of_tokens),) if rows_of_tokens != vocab else ()


def per_layer_axis(model: ModelConfig) -> tuple[str, int]:
    """The axis along which per-layer embeddings are cut, and its size."""
    return (*model.extra_axes, ("vocab", model.vocab_size))[0]


def tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor, in the order of use."""
    width, bias = model.per_layer_width, ConfigReader(model.text).flag("attention_bias", False)
    yield common.embedding(model)
    if width:
        yield from _per_layer_embedding(model)
    for i, layer in enumerate(model.layers):
        assert layer.attention is not None
        p = f"model.layers.{i}."
        yield from _layer(p, layer.attention, layer.ffn, model.hidden_size, bias)
        if width:
            yield TensorSpec(f"{p}per_layer_input_gate.weight", (width, model.hidden_size))
            yield TensorSpec(f"{p}per_layer_projection.weight", (model.hidden_size, width))
            yield common.norm(f"{p}post_per_layer_input_norm", model.hidden_size)
        yield TensorSpec(f"{p}layer_scalar", (1,))
    yield from common.head(model)


def _per_layer_embedding(model: ModelConfig) -> Iterator[TensorSpec]:
    """Embeddings [V, L*P] by vocabulary rows; the projection and the norm that go with them are small and copied."""
    axis, size = per_layer_axis(model)
    total = len(model.layers) * model.per_layer_width
    yield TensorSpec("model.embed_tokens_per_layer.weight", (size, total), rows(axis))
    yield TensorSpec("model.per_layer_model_projection.weight", (total, model.hidden_size))
    yield common.norm("model.per_layer_projection_norm", model.per_layer_width)


def _layer(prefix: str, a: Attention, ffn: Ffn, hidden: int, bias: bool) -> Iterator[TensorSpec]:
    """Attention and MLP of one layer with their norms; one that shares keys has neither their projection nor norm."""
    p = f"{prefix}self_attn."
    yield common.norm(f"{prefix}input_layernorm", hidden)
    yield from common.projections(p, a, hidden, qkv_bias=bias)
    yield common.norm(f"{p}q_norm", a.head_dim)
    if a.kv_source is None:
        yield common.norm(f"{p}k_norm", a.head_dim)
    yield from common.output(p, a, hidden, bias=bias)
    yield common.norm(f"{prefix}post_attention_layernorm", hidden)
    yield common.norm(f"{prefix}pre_feedforward_layernorm", hidden)
    yield from common.mlp(f"{prefix}mlp.", ffn, hidden)
    yield common.norm(f"{prefix}post_feedforward_layernorm", hidden)


_SHARED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def is_unused(model: ModelConfig, name: str) -> bool:
    """Whether a tensor is a leftover of training: layers that use another one's keys may still have some of their own."""
    found = _SHARED.match(name)
    if found is None or int(found[1]) >= len(model.layers):
        return False
    attention = model.layers[int(found[1])].attention
    return attention is not None and attention.kv_source is not None
