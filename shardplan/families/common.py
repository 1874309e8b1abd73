"""What the families share: the decoder skeleton's config fields and tensors.

Shapes: V vocabulary, H hidden, I ffn width, D head dimension, Hq/Hkv query and key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import Attention, ConfigReader, Ffn, Layer, ModelConfig, Scales, text_config
from ..errors import CheckpointError
from ..partition import Cut, Segment, TensorSpec, columns, rows, segmented
from ..rope import Rope, parse_rope, rope_parameters
from ..values import shown

_MOST_LAYERS = _MOST_EXPERTS = 10_000
"""Bounds, so that a wrong number cannot exhaust memory."""


def heads(reader: ConfigReader) -> tuple[int, int]:
    """(query heads, key/value heads), checked to form whole groups."""
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", num_heads)
    check_groups(num_heads, num_kv_heads)
    return num_heads, num_kv_heads


def check_groups(num_heads: int, num_kv_heads: int) -> None:
    """Raise CheckpointError unless every key/value head serves equally many query heads."""
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            "fix config.json",
        )


def attention(
    reader: ConfigReader,
    *,
    head_dim: int | None = None,
    scaling: float | None = None,
    window: int | None = None,
    **rope: Any,
) -> Attention:
    """Attention from the usual fields; `head_dim` defaults to the config's, then to hidden_size / heads."""
    num_heads, num_kv_heads = heads(reader)
    d = reader.count("head_dim", head_dim or max(1, reader.count("hidden_size") // num_heads))
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=d,
        scaling=d**-0.5 if scaling is None else scaling,
        rope=parse_rope(reader.values, d, **rope),
        window=window,
    )


def window(reader: ConfigReader, default: int | None) -> int | None:
    """`sliding_window`: `default` when the key is absent, no window when it is null."""
    if reader.values.get("sliding_window", default) is None:
        return None
    return reader.count("sliding_window", default)


def ropes_by_layer_type(
    text: Mapping[str, Any], head_dim: int, thetas: Mapping[str, tuple[str | None, float]], **rope: Any
) -> dict[str, Rope]:
    """The rotary embedding of every layer type, where they differ; `thetas` are the old key of each and its default.

    Older files have a flat `rope_scaling`, which is for the layers with full attention only. Flat `rope_parameters`
    are ignored, as transformers does.
    """
    given = rope_parameters({"rope_parameters": text.get("rope_parameters")})
    nested = {kind: dict(given[kind]) if isinstance(given.get(kind), Mapping) else {} for kind in thetas}
    nested["full_attention"].update(rope_parameters({"rope_scaling": text.get("rope_scaling")}))
    for kind, (key, _) in thetas.items():
        if key is not None and text.get(key) is not None:
            nested[kind].setdefault("rope_theta", text[key])
    settled = {**text, "rope_scaling": None, "rope_parameters": nested, "rope_theta": None}
    return {
        kind: parse_rope(settled, head_dim, layer_type=kind, default_theta=theta, **rope)
        for kind, (_, theta) in thetas.items()
    }


def softcap(reader: ConfigReader) -> float | None:
    """`final_logit_softcapping`: the bound on the logits' size, if any."""
    key = "final_logit_softcapping"
    return None if reader.get(key) is None else reader.positive(key, 1.0)


def settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's settings as one flat object, with `defaults` for the keys that its config.json leaves out.

    Released files rely on the class's defaults: a Gemma 3 wrapper need not state how many heads its text model has.
    """
    return {**defaults, **text_config(config), "architectures": config.get("architectures")}


def model_config(
    config: Mapping[str, Any],
    family: str,
    layers: list[Layer],
    *,
    norm_eps: float = 1e-6,
    tie: bool = False,
    max_position: int = 2048,
    activation: str | None = None,
    scales: Scales | None = None,
    **fields: Any,
) -> ModelConfig:
    """The fields every family has, with the family's defaults for what config.json leaves out, and further `fields`."""
    reader = ConfigReader(text_config(config))
    reader.refuse("per_layer_config", {})
    return ModelConfig(
        family=family,
        architecture=architecture(config),
        hidden_size=reader.count("hidden_size"),
        vocab_size=reader.count("vocab_size"),
        max_position=reader.count("max_position_embeddings", max_position),
        norm_eps=reader.number("rms_norm_eps", norm_eps),
        activation=activation or reader.activation(),
        tie_word_embeddings=reader.flag("tie_word_embeddings", tie),
        layers=tuple(layers),
        text=reader.values,
        scales=scales or Scales(),
        **fields,
    )


def architecture(config: Mapping[str, Any]) -> str:
    """The class name in `architectures`; raises CheckpointError when there is none."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json: architectures is {shown(names)}, must name one class",
            "take config.json from the model's repository",
        )
    return names[0]


def num_layers(reader: ConfigReader) -> int:
    """The number of decoder layers."""
    return reader.count("num_hidden_layers", most=_MOST_LAYERS)


def uniform_layers(reader: ConfigReader, layer_attention: Attention) -> list[Layer]:
    """The same attention and feed-forward width in every layer."""
    return [Layer(Ffn(reader.count("intermediate_size")), layer_attention)] * num_layers(reader)


def embedding(model: ModelConfig) -> TensorSpec:
    """model.embed_tokens.weight [V, H], by vocabulary rows."""
    return TensorSpec("model.embed_tokens.weight", (model.vocab_size, model.hidden_size), rows("vocab"))


def head(model: ModelConfig) -> Iterator[TensorSpec]:
    """The final norm, then lm_head.weight [V, H] by vocabulary rows unless it is the embedding itself."""
    yield norm("model.norm", model.hidden_size)
    if not model.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", (model.vocab_size, model.hidden_size), rows("vocab"))


def norm(name: str, size: int) -> TensorSpec:
    """A norm's weight [size], copied to every rank."""
    return TensorSpec(f"{name}.weight", (size,))


def projections(
    prefix: str, a: Attention, hidden: int, *, qkv_bias: bool = False, gated: bool = False
) -> Iterator[TensorSpec]:
    """q/k/v projections [heads*D, H] by whole heads, adjacent, then their biases, adjacent; those that the layer has.

    With `gated` each query head has 2*D rows: its query, then its gates.
    """
    d = a.head_dim
    every = (
        ("q_proj", a.q_axis, a.num_heads, 2 * d if gated else d),
        ("k_proj", a.kv_axis, a.num_kv_heads, d),
        ("v_proj", a.kv_axis, a.num_kv_heads, d),
    )
    parts = [part for part in every if part[0] in a.projections]
    for name, axis, count, block in parts:
        yield TensorSpec(f"{prefix}{name}.weight", (count * block, hidden), rows(axis, block), f"{prefix}qkv")
    if qkv_bias:
        for name, axis, count, block in parts:
            yield TensorSpec(f"{prefix}{name}.bias", (count * block,), rows(axis, block), f"{prefix}qkv.bias")


def packed_projections(prefix: str, a: Attention, hidden: int) -> Iterator[TensorSpec]:
    """One qkv_proj [(Hq + 2 Hkv)*D, H], q over k over v: each segment is cut by its heads."""
    sizes, d = {a.q_axis: a.num_heads, a.kv_axis: a.num_kv_heads}, a.head_dim
    cut = segmented(0, (a.q_axis, d), (a.kv_axis, d), (a.kv_axis, d), sizes=sizes)
    yield TensorSpec(f"{prefix}qkv_proj.weight", ((a.num_heads + 2 * a.num_kv_heads) * d, hidden), cut)


def output(prefix: str, a: Attention, hidden: int, *, bias: bool = False, name: str = "o_proj") -> Iterator[TensorSpec]:
    """The output projection [H, Hq*D] by the columns of whole heads; its bias stays whole and is added once."""
    yield TensorSpec(f"{prefix}{name}.weight", (hidden, a.num_heads * a.head_dim), columns(a.q_axis, a.head_dim))
    if bias:
        yield TensorSpec(f"{prefix}{name}.bias", (hidden,))


def mlp(prefix: str, ffn: Ffn, hidden: int, *, bias: bool = False) -> Iterator[TensorSpec]:
    """gate and up [I, H] by rows, adjacent, then down [H, I] by columns; down's bias stays whole."""
    for name in ("gate_proj", "up_proj"):
        yield TensorSpec(f"{prefix}{name}.weight", (ffn.size, hidden), rows(ffn.axis), f"{prefix}gate_up")
    if bias:
        for name in ("gate_proj", "up_proj"):
            yield TensorSpec(f"{prefix}{name}.bias", (ffn.size,), rows(ffn.axis), f"{prefix}gate_up.bias")
    yield TensorSpec(f"{prefix}down_proj.weight", (hidden, ffn.size), columns(ffn.axis))
    if bias:
        yield TensorSpec(f"{prefix}down_proj.bias", (hidden,))


def packed_mlp(prefix: str, ffn: Ffn, hidden: int) -> Iterator[TensorSpec]:
    """One gate_up_proj [2 I, H], gate over up, each half cut by rows; then down [H, I] by columns."""
    cut = segmented(0, (ffn.axis, 1), (ffn.axis, 1), sizes={ffn.axis: ffn.size})
    yield TensorSpec(f"{prefix}gate_up_proj.weight", (2 * ffn.size, hidden), cut)
    yield TensorSpec(f"{prefix}down_proj.weight", (hidden, ffn.size), columns(ffn.axis))


def mixture(model: ModelConfig, layer: str, ffn: Ffn, block: str, names: tuple[str, str, str]) -> Iterator[TensorSpec]:
    """A mixture of experts: the router [E, H], whole, and the experts, each cut like an MLP.

    Checkpoints hold the experts one by one in `block`, `names` being what gate, up and down are called there, or
    stacked in `mlp`. Either way a rank can view its columns of them as stacks [E, 2 I, H] and [E, H, I].
    """
    p = f"{layer}{'mlp' if model.stacked_experts else block}."
    yield TensorSpec(f"{p}gate.weight", (ffn.num_experts, model.hidden_size))
    if model.stacked_experts:
        yield from _stacked_experts(f"{p}experts.", ffn, model.hidden_size)
    else:
        yield from _single_experts(f"{p}experts.", ffn, model.hidden_size, names)


def _stacked_experts(prefix: str, ffn: Ffn, hidden: int) -> Iterator[TensorSpec]:
    """gate_up_proj [E, 2 I, H], gate over up, and down_proj [E, H, I]."""
    count, size = ffn.num_experts, ffn.size
    gate_over_up = segmented(1, (ffn.axis, 1), (ffn.axis, 1), sizes={ffn.axis: size})
    yield TensorSpec(f"{prefix}gate_up_proj", (count, 2 * size, hidden), gate_over_up)
    yield TensorSpec(f"{prefix}down_proj", (count, hidden, size), Cut(2, (Segment(ffn.axis),)))


def _single_experts(prefix: str, ffn: Ffn, hidden: int, names: tuple[str, str, str]) -> Iterator[TensorSpec]:
    """gate and up [I, H] of all experts, one after another, then all downs [H, I]."""
    gate, up, down = names
    for e in range(ffn.num_experts):
        for name in (gate, up):
            cut, fuse = rows(ffn.axis), f"{prefix}gate_up"
            yield TensorSpec(f"{prefix}{e}.{name}.weight", (ffn.size, hidden), cut, fuse)
    for e in range(ffn.num_experts):
        yield TensorSpec(f"{prefix}{e}.{down}.weight", (hidden, ffn.size), columns(ffn.axis), f"{prefix}down")


def expert_ffn(size: int, num_experts: int, experts_per_token: int) -> Ffn:
    """The width of each of `num_experts` experts, checked to be enough for what a token uses."""
    if experts_per_token > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {experts_per_token} is more than the {num_experts} experts",
            "fix config.json",
        )
    if num_experts > _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json: {num_experts} experts are more than {_MOST_EXPERTS} in a layer", "fix config.json"
        )
    return Ffn(size, "expert_ffn", num_experts, experts_per_token)
