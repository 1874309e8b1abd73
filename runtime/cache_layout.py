"""Which layers cache what: pure functions of the model, used by the scheduler and the cache.

Layers with the same window form a group and share block tables. A group's blocks hold `block_size` tokens of all its
layers. Delta-net layers keep a fixed state a sequence instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..shardplan.config import ModelConfig
from ..shardplan.partition import Axis

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same tokens: all of them (window None), or the last `window`."""

    window: int | None
    layers: tuple[int, ...]

    def first_needed(self, position: int) -> int:
        """The first token that a query at `position` or later can still see."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def cache_groups(model: ModelConfig) -> list[CacheGroup]:
    """The groups of `model`, full attention first. Layers that read another layer's cache belong to none."""
    layers: dict[int | None, list[int]] = {}
    for i, layer in enumerate(model.layers):
        if layer.attention is not None and layer.attention.kv_source is None:
            layers.setdefault(layer.attention.window, []).append(i)
    order = sorted(layers, key=lambda w: (w is not None, w or 0))
    return [CacheGroup(window, tuple(layers[window])) for window in order]


def kv_shape(model: ModelConfig, axes: Mapping[str, Axis], rank: int, layer: int) -> tuple[int, int]:
    """(kv heads of `rank`, head dimension) of one attention layer."""
    a = model.layers[layer].attention
    assert a is not None
    start, stop = axes[a.kv_axis].ranges[rank]
    return stop - start, a.head_dim
