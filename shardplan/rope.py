"""Rotary position embeddings as a model's config states them, in every spelling seen on disk.

transformers 5 writes `rope_parameters`; older files have `rope_theta` plus an optional `rope_scaling`. A non-empty
`rope_scaling` replaces `rope_parameters` entirely, as transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError
from .values import is_finite_number, shown

KINDS = ("default", "linear", "dynamic", "ntk_alpha", "llama3", "yarn", "longrope", "proportional")

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer type.

    `rotary_dim` dimensions rotate, in pairs (i, i + rotary_dim/2) or, when `interleaved`, (2i, 2i+1); the rest pass
    through. They do so in the model's dtype, or `in_float32`, or in the wider of the two (`float32_tables`: cos and sin
    alone are kept in float32). The fields after that belong to the kinds named in their comment.
    """

    kind: str
    theta: float
    rotary_dim: int
    interleaved: bool = False
    in_float32: bool = False
    float32_tables: bool = False
    original_max_position: int = 0  # dynamic, llama3, yarn, longrope
    factor: float = 1.0  # linear, dynamic, llama3, yarn, longrope, proportional
    alpha: float = 1.0  # ntk_alpha
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin
    rotated_pairs: int = 0  # proportional: pairs that rotate, the others stand still
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change once a sequence exceeds the original length."""
        return self.kind in ("dynamic", "longrope")


def parse_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    default_theta: float = 10000.0,
    partial_rotary_factor: float | None = None,
    interleaved: bool = False,
    in_float32: bool = False,
    float32_tables: bool = False,
    layer_type: str | None = None,
    static_alpha: bool = False,
) -> Rope:
    """The rotary embedding that `config` (a text config) states; `layer_type` picks a nested per-type entry.

    `partial_rotary_factor`: the family's default; None where the family rotates whole heads, whatever a config says.
    `static_alpha`: the family reads `dynamic` with an `alpha` as a fixed stretch (HunYuan); others ignore `alpha`.

    Raises CheckpointError for an unknown type, a missing or ill-typed field, or a head_dim that is odd.
    """
    params = rope_parameters(config, layer_type)
    kind = params.get("rope_type") or params.get("type") or "default"
    if static_alpha and kind == "dynamic" and params.get("alpha"):
        kind = "ntk_alpha"
    if kind not in KINDS:
        raise CheckpointError(f"rope_type is {shown(kind)}, which is not supported", f"supported: {', '.join(KINDS)}")
    for key in _REQUIRED.get(kind, ()):
        if params.get(key) is None and not (kind == "yarn" and key == "factor"):
            raise CheckpointError(
                f"{key!r} is missing from the rope settings of type {kind!r}", "add the field, see the model card"
            )
    theta = _number(params.get("rope_theta", config.get("rope_theta")), "rope_theta", default_theta)
    partial = _number(
        params.get("partial_rotary_factor", config.get("partial_rotary_factor")),
        "partial_rotary_factor",
        1.0 if partial_rotary_factor is None else partial_rotary_factor,
    )
    if partial_rotary_factor is None and partial != 1 and kind != "proportional":
        raise CheckpointError(
            f"partial_rotary_factor is {partial:g}, and models of this family rotate whole heads",
            "take it out of config.json if the model was trained so: transformers does not look at it",
        )
    if partial > 1:
        raise CheckpointError(f"rope setting 'partial_rotary_factor' is {partial}, more than 1", "fix config.json")
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if rotary_dim % 2 or rotary_dim <= 0:
        raise CheckpointError(
            f"rotary dimension {rotary_dim} must be even and positive", "check head_dim in config.json"
        )
    base = Rope(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        in_float32=in_float32,
        float32_tables=float32_tables,
    )
    return _with_kind(base, params, config, partial, head_dim)


def rope_parameters(config: Mapping[str, Any], layer_type: str | None = None) -> Mapping[str, Any]:
    """The rope dictionary in force, legacy or new, for one layer type where they are nested.

    Raises CheckpointError when either of the two is there and not an object.
    """
    given = [config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    for params in given:
        if not isinstance(params, Mapping):
            raise CheckpointError(
                f"rope_scaling or rope_parameters is {shown(params)}, must be an object", "fix config.json"
            )
    params = given[0] if given else {}
    if layer_type is not None and isinstance(params.get(layer_type), Mapping):
        return params[layer_type]
    return params


def _with_kind(rope: Rope, params: Mapping, config: Mapping, partial: float, head_dim: int) -> Rope:
    """`rope` with the fields of its kind filled in."""
    from dataclasses import replace

    kind = rope.kind
    max_position = _position(config.get("max_position_embeddings"), "max_position_embeddings", 2048)
    original = params.get("original_max_position_embeddings") or max_position
    if config.get("original_max_position_embeddings"):
        original = config["original_max_position_embeddings"]
    original = _position(original, "original_max_position_embeddings", max_position)
    if kind == "ntk_alpha":
        return replace(rope, alpha=_number(params["alpha"], "alpha", 1.0))
    if kind == "proportional":
        factor = _number(params.get("factor"), "factor", 1.0)
        return replace(rope, factor=factor, rotated_pairs=int(partial * head_dim // 2))
    if kind in ("default", "linear"):
        return replace(rope, factor=_number(params.get("factor"), "factor", 1.0) if kind == "linear" else 1.0)
    rope = replace(
        rope, original_max_position=original, factor=_number(params.get("factor"), "factor", max_position / original)
    )
    if kind == "dynamic":
        return replace(rope, original_max_position=max_position)
    if kind == "llama3":
        low, high = (_number(params[k], k, 1.0) for k in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise CheckpointError(f"rope low_freq_factor {low} is not below high_freq_factor {high}", "fix config.json")
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        return _longrope(rope, params)
    return _yarn(rope, params, config)


def _yarn(rope: Rope, params: Mapping, config: Mapping) -> Rope:
    from dataclasses import replace

    given = params.get("attention_factor")
    mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
    if given is not None:
        attention = given
    elif mscale and mscale_all:
        over, under = _number(mscale, "mscale", 1.0), _number(mscale_all, "mscale_all_dim", 1.0)
        attention = yarn_mscale(rope.factor, over) / yarn_mscale(rope.factor, under)
    else:
        attention = yarn_mscale(rope.factor, 1.0)
    # transformers reads `truncate` from the top level of rope_parameters, so nested dictionaries always truncate.
    top = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return replace(
        rope,
        attention_factor=_number(attention, "attention_factor", 1.0),
        beta_fast=_number(params.get("beta_fast"), "beta_fast", 32.0),
        beta_slow=_number(params.get("beta_slow"), "beta_slow", 1.0),
        truncate=bool(top.get("truncate", True)),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature (Peng et al. 2023, eq. 22): 0.1 * mscale * ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Rope, params: Mapping) -> Rope:
    from dataclasses import replace

    lists = []
    for key in ("short_factor", "long_factor"):
        values = params[key]
        if not isinstance(values, list) or len(values) != rope.rotary_dim // 2:
            got = len(values) if isinstance(values, list) else shown(values)
            raise CheckpointError(
                f"rope {key} must hold {rope.rotary_dim // 2} numbers, got {got}", "fix rope_scaling in config.json"
            )
        lists.append(tuple(_number(v, key, 1.0) for v in values))
    given = params.get("attention_factor")
    if given is None:
        ratio = rope.factor
        # The logarithm of an original length of 1 would be a division by zero.
        length = max(rope.original_max_position, 2)
        given = math.sqrt(1 + math.log(ratio) / math.log(length)) if ratio > 1 else 1.0
    return replace(
        rope, short_factor=lists[0], long_factor=lists[1], attention_factor=_number(given, "attention_factor", 1.0)
    )


def _number(value: Any, key: str, default: float) -> float:
    """`value` as a positive finite float, or `default` when it is absent."""
    if value is None:
        return float(default)
    if not is_finite_number(value) or value <= 0:
        raise CheckpointError(f"rope setting {key!r} must be a positive number, not {shown(value)}", "fix config.json")
    return float(value)


def _position(value: Any, key: str, default: int) -> int:
    """`value` as a number of positions, at least 1, or `default` when it is absent."""
    return max(1, int(_number(value, key, default)))
