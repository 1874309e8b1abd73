"""What the planner and the runtime need to know of a model, read strictly from its config.json.

H hidden size, D head dimension, Hq/Hkv query and key/value heads, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .errors import CheckpointError
from .rope import Rope
from .values import is_finite_number, shown

_MOST = (1 << 40) - 1
"""The largest count: sizes of tensors stay within 64 bits, and larger ones are damage."""

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")


@dataclass(frozen=True)
class Attention:
    """Softmax attention of one layer. `window` keys are visible to a query, itself included (None: all).

    `q_axis` and `kv_axis` name the model axes its heads are shared out on; `kv_source` is the layer whose keys and
    values this one uses instead of its own. With `keys_as_values` the key projection gives the values too.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    rope: Rope
    window: int | None = None
    q_axis: str = "q_heads"
    kv_axis: str = "kv_heads"
    kv_source: int | None = None
    keys_as_values: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        """The input projections that this layer has weights of its own for."""
        if self.kv_source is not None:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.keys_as_values else ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net of one layer: a recurrent state [v heads, key_dim, value_dim] instead of a KV cache."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int


@dataclass(frozen=True)
class Ffn:
    """Feed-forward width of one layer; with `num_experts`, of each expert, `experts_per_token` of which are used."""

    size: int
    axis: str = "ffn"
    num_experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True)
class Layer:
    """One decoder layer: either attention or a delta net, then a feed-forward part."""

    ffn: Ffn
    attention: Attention | None = None
    delta_net: DeltaNet | None = None


@dataclass(frozen=True)
class Scales:
    """Constants that some families multiply by; the defaults change nothing.

    With `round_embedding` the embedding's factor is itself rounded to the weights' dtype first.
    """

    embedding: float = 1.0
    round_embedding: bool = False
    residual: float = 1.0  # of what attention and feed-forward add to the residual stream
    logit_divisor: float = 1.0
    logit_softcap: float | None = None  # cap * tanh(logits / cap)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model, independent of how its config.json spells it.

    `extra_axes` are the sizes of model axes that neither the layers nor the vocabulary name. `per_layer_width` is that
    of a token's embedding for each layer, where there are such.
    """

    family: str
    architecture: str
    hidden_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    text: Mapping[str, Any] = field(repr=False, compare=False)
    scales: Scales = Scales()
    extra_axes: tuple[tuple[str, int], ...] = ()
    per_layer_width: int = 0
    stacked_experts: bool = False  # on disk the experts of a layer are stacks, not tensors of their own

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether cached keys of one prefix can differ between prompts (see Rope.depends_on_length)."""
        return any(layer.attention is not None and layer.attention.rope.depends_on_length for layer in self.layers)


class ConfigReader:
    """Typed access to one config object; every error names the key and its value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value, or `default` when the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """A positive integer up to `most`, or with `least` 0 one that may be zero."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"config.json: {key!r} is missing", "take config.json from the model's repository")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._bad(key, value, f"a positive integer{'' if least else ' or 0'}, at most {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.get(key, default)
        if not is_finite_number(value):
            raise self._bad(key, value, "a finite number")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if value <= 0:
            raise self._bad(key, value, "a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        """The name of an activation function that the runtime has."""
        value = self.get(key, default)
        if value not in ACTIVATIONS:
            raise self._bad(key, value, f"one of {', '.join(ACTIVATIONS)}")
        return value

    def layer_types(self, num_layers: int, allowed: Sequence[str], default: Sequence[str]) -> list[str]:
        """The `layer_types` list, checked for length and spelling."""
        value = self.get("layer_types", list(default))
        if not isinstance(value, list) or len(value) != num_layers or not all(v in allowed for v in value):
            raise self._bad("layer_types", value, f"{num_layers} entries out of {', '.join(allowed)}")
        return value

    def refuse(self, key: str, unless: Any = None) -> None:
        """Raise when an option that mgtp does not implement is switched on."""
        value = self.get(key, unless)
        if value != unless:
            raise CheckpointError(
                f"config.json: {key}={shown(value)} is not supported", "this variant of the model cannot be run yet"
            )

    def _bad(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"config.json: {key} is {shown(value)}, must be {wanted}", "fix config.json")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Around code that reads a config: its CheckpointErrors begin with `where` that config.json is."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error.message.removeprefix('config.json: ')}", error.hint) from None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's settings: `text_config` of a multimodal wrapper, else the config itself.

    Either level may say that embeddings are tied: which one counts has changed over the versions of transformers, and
    where a head is stored it is used in any case.
    """
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config is {shown(text)}, must be an object", "fix config.json")
    flags = [flag for level in (text, config) if (flag := level.get("tie_word_embeddings")) is not None]
    if not flags:
        return text
    return {**text, "tie_word_embeddings": any(flag is True for flag in flags) or flags[0]}
