"""config.json of a model in a GGUF file, rebuilt from metadata: what transformers' AutoConfig accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..values import counted, shown
from .gguf_metadata import Metadata
from .gguf_tensors import ARCHS, ROPE_FACTORS, Arch, Weight

# Settings that change what a model computes and that no config here can express, with the values that mean "off".
_MUST_BE_OFF: dict[str, tuple[float, ...]] = {
    "expert_count": (0,),
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
# Settings that say nothing new: the vocabulary is counted in the embedding, whether a model was tuned is history.
_REDUNDANT = ("vocab_size", "rope.scaling.finetuned")

_YARN_FIELDS = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192

_GEMMA3_PERIOD = 6  # every 6th layer attends to everything, the others to a window
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True)
class Shape:
    """The sizes that both the config and the tensor names need."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int


def architecture(metadata: Metadata) -> tuple[str, Arch]:
    """`general.architecture` and what is known of it; raises CheckpointError for one that cannot be read."""
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise metadata.error(f"this is a GGUF {shown(kind)}, not a model", "give the file of the language model")
    name = metadata.text("general.architecture")
    if name not in ARCHS:
        raise metadata.error(f"GGUF architecture {shown(name)} is not supported", f"supported: {', '.join(ARCHS)}")
    return name, ARCHS[name]


def read_shape(metadata: Metadata, arch: str, num_tensors: int) -> Shape:
    """Sizes of a model of `num_tensors` tensors.

    Raises CheckpointError for a size that is missing, for more layers than tensors, for a rotation over a part of the
    head and for v heads of another size than k heads.
    """
    hidden = metadata.positive(f"{arch}.embedding_length")
    heads = metadata.positive(f"{arch}.attention.head_count")
    default = 256 if arch == "gemma3" else max(hidden // heads, 1)
    head_dim = metadata.positive(f"{arch}.attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.integer(f"{arch}.{key}", head_dim)
        if value != head_dim:
            raise metadata.error(f"{arch}.{key} is {value}, but heads are {head_dim} wide, which is not supported")
    num_layers = metadata.positive(f"{arch}.block_count")
    if num_layers > num_tensors:
        raise metadata.error(f"{arch}.block_count is {num_layers}, but the file holds {counted(num_tensors, 'tensor')}")
    return Shape(
        num_layers,
        heads,
        metadata.positive(f"{arch}.attention.head_count_kv", heads),
        head_dim,
        hidden,
    )


def build_config(
    metadata: Metadata, arch: str, shape: Shape, weights: Mapping[str, Weight], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The config without token ids. `rope_factors` holds the values of rope_freqs.weight, where there is one.

    Raises CheckpointError naming a metadata key or tensor that is missing, contradicts another, or asks for something
    that a config cannot say.
    """
    _refuse_what_is_on(metadata, arch)
    embedding = weights.get("model.embed_tokens.weight")
    if embedding is None:
        raise metadata.error("tensor 'token_embd.weight' is missing", "give the file of the whole model")
    rows, columns = embedding.info.shape
    if columns != shape.hidden_size:
        raise metadata.error(f"tensor 'token_embd.weight' has {columns} columns, the model {shape.hidden_size}")
    config: dict[str, Any] = {
        "architectures": [ARCHS[arch].architecture],
        "model_type": ARCHS[arch].model_type,
        "vocab_size": rows,
        "hidden_size": shape.hidden_size,
        "intermediate_size": metadata.positive(f"{arch}.feed_forward_length"),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": metadata.positive(f"{arch}.context_length"),
        "rms_norm_eps": metadata.positive_number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive_number(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    scaling = _rope_scaling(metadata, arch)
    if rope_factors is not None:
        if scaling is not None:
            raise metadata.error(f"both {ROPE_FACTORS} and {arch}.rope.scaling are there, which is not supported")
        scaling = _llama3_scaling(metadata, rope_factors, shape.head_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= _FAMILY_FIELDS[arch](metadata, shape, weights)
    return config


def unused_keys(metadata: Metadata, arch: str) -> list[str]:
    """Settings of the model that nothing has read."""
    for key in _REDUNDANT:
        _ = f"{arch}.{key}" in metadata
    return metadata.unasked(f"{arch}.")


def _refuse_what_is_on(metadata: Metadata, arch: str) -> None:
    if not metadata.flag(f"{arch}.attention.causal", True):
        raise metadata.error(
            f"{arch}.attention.causal is false: this model does not generate text", "use another model"
        )
    for key, off in _MUST_BE_OFF.items():
        name = f"{arch}.{key}"
        if name not in metadata:
            continue
        value = metadata.number(name)
        if value not in off:
            what = "mixture-of-experts models in GGUF are" if key == "expert_count" else "this is"
            raise metadata.error(f"{name} is {value:g}: {what} not supported", "use the original checkpoint")


def _rope_scaling(metadata: Metadata, arch: str) -> dict[str, Any] | None:
    """rope_scaling from `rope.scaling.*`; a factor without a type is linear, as in llama.cpp."""
    prefix = f"{arch}.rope.scaling"
    kind = metadata.text(f"{prefix}.type", "linear")
    factor = metadata.number(f"{prefix}.factor", metadata.number(f"{arch}.rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.error(f"{prefix}.type {shown(kind)} is not supported", "supported: none, linear, yarn")
    if factor < 1:
        raise metadata.error(f"{prefix}.factor is {factor:g}, must be at least 1")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = metadata.positive(f"{arch}.context_length")
        scaling["original_max_position_embeddings"] = metadata.positive(f"{prefix}.original_context_length", context)
        for key, field in _YARN_FIELDS.items():
            if f"{prefix}.{key}" in metadata:
                scaling[field] = metadata.number(f"{prefix}.{key}")
    return scaling


def _llama3_scaling(metadata: Metadata, factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any] | None:
    """The llama3 rope_scaling whose frequencies are the default ones divided by `factors` [D/2].

    Llama 3.1 to 3.3 differ in nothing but the factor, which is the last entry. Raises CheckpointError when the
    factors are those of something else.
    """
    factors = factors.ravel().astype(np.float64)
    factor = float(factors[-1])
    fits = math.isfinite(factor) and factor >= 1
    if not fits or not np.allclose(factors, _llama3_factors(head_dim, theta, factor), rtol=1e-4, atol=0):
        raise metadata.error(
            f"the frequencies in {ROPE_FACTORS} are not those of a llama3 scaling with low_freq_factor 1, "
            "high_freq_factor 4 and an original context of 8192",
            "use the original checkpoint",
        )
    if factor == 1:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What llama3 scaling divides the D/2 frequencies by: 1 for short waves, `factor` for long ones, a blend between."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = (_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    blend = blend.clip(0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _llama_fields(metadata: Metadata, shape: Shape, weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Llama, or Mistral where there is a sliding window: llama.cpp files both under one name."""
    fields: dict[str, Any] = {"hidden_act": "silu"}
    if "llama.attention.sliding_window" in metadata:
        window = metadata.integer("llama.attention.sliding_window")
        if window:
            return fields | {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": window,
            }
    return fields | {
        "attention_bias": _has_biases(metadata, weights, ("q_proj", "k_proj", "v_proj", "o_proj")),
        "mlp_bias": _has_biases(metadata, weights, ("gate_proj", "up_proj", "down_proj")),
    }


def _qwen2_fields(metadata: Metadata, shape: Shape, weights: Mapping[str, Weight]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3_fields(metadata: Metadata, shape: Shape, weights: Mapping[str, Weight]) -> dict[str, Any]:
    bias = _has_biases(metadata, weights, ("q_proj", "k_proj", "v_proj", "o_proj"))
    return {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": bias}


def _has_biases(metadata: Metadata, weights: Mapping[str, Weight], projections: tuple[str, ...]) -> bool:
    """Whether the projections have biases; Hugging Face's switch is one for all of them."""
    found = [p for p in projections if any(name.endswith(f".{p}.bias") for name in weights)]
    if found and len(found) < len(projections):
        missing = sorted(set(projections) - set(found))
        raise metadata.error(
            f"{', '.join(found)} have biases, {', '.join(missing)} have none, which is not supported",
            "use the original checkpoint",
        )
    return bool(found)


def _gemma3_fields(metadata: Metadata, shape: Shape, weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Gemma 3: windowed layers with their own rotation; without a window every layer attends to everything."""
    window = metadata.integer("gemma3.attention.sliding_window", 0)
    windowed = _gemma3_windowed(metadata, shape.num_layers) if window else [False] * shape.num_layers
    # Only the 27B model scales queries by the width a head would have if the heads made up the hidden size.
    is_27b = shape.num_layers == _GEMMA3_27B_LAYERS
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": shape.hidden_size // shape.num_heads if is_27b else shape.head_dim,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        "sliding_window": window or None,
        "rope_theta": metadata.positive_number("gemma3.rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.positive_number("gemma3.rope.freq_base_swa", 10000.0),
    }
    softcap = metadata.number("gemma3.final_logit_softcapping", 0.0)
    return fields | ({"final_logit_softcapping": softcap} if softcap else {})


def _gemma3_windowed(metadata: Metadata, num_layers: int) -> list[bool]:
    """Which layers attend to a window: stated one by one, or all but every n-th."""
    key = "gemma3.attention.sliding_window_pattern"
    if metadata.is_array(key):
        pattern = metadata.numbers(key)
        if len(pattern) != num_layers:
            raise metadata.error(f"{key} has {counted(len(pattern), 'entry')} for {counted(num_layers, 'layer')}")
        return [bool(value) for value in pattern]
    period = metadata.positive(key, _GEMMA3_PERIOD)
    return [(i + 1) % period != 0 for i in range(num_layers)]


_FAMILY_FIELDS = {
    "llama": _llama_fields,
    "qwen2": _qwen2_fields,
    "qwen3": _qwen3_fields,
    "gemma3": _gemma3_fields,
}
