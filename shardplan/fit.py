"""Does it fit: what a rank needs on its device, and how much context that leaves. Pure functions, nothing is measured.

memory of the device
- context            CONTEXT_BYTES, and with several ranks COLLECTIVE_BYTES
- weights            what the plan gives the rank, padding included
= free
cache budget = min(CACHE_FRACTION * free, free - workspace)

workspace = T * s * (4 H + widest layer) + 3 * 4 * S * V
            T tokens of a step, s bytes an element, H hidden size, S sequences, V vocabulary; the widest layer holds
            2 (q + 2 kv) heads * D and 3 ffn columns (of each expert that a token uses) of the rank; logits are
            float32, gathered from all ranks, sorted and turned into probabilities

cache(n sequences of L tokens) = sum over groups of layers with the same window: (n * blocks + 1) * block bytes
                                 + (n + 1) * recurrent state
            blocks = ceil(min(L, window + min(T, L) + B) / B) of B tokens; a block holds keys and values of the
            rank's kv heads, copied ones included, in the plan's dtype; layers that read another layer's cache
            have none; one block a group and one state are scratch. With C ranks on the cp axis, a block spans C * B
            tokens, of which each of them keeps B
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import Layer, ModelConfig
from .errors import MgtpError
from .families import model_tensors
from .partition import Axis, TensorSpec, model_axes, part_bytes, rank_shape
from .quantities import lowest_terms
from .recurrent_state import state_bytes

CONTEXT_BYTES = 700 << 20
"""What CUDA, cuBLAS and the kernels take of a device before the cache is made: 686 MiB seen (docs/performance.md)."""

COLLECTIVE_BYTES = 800 << 20
"""What NCCL takes more, once there are several ranks: 782 MiB seen with two."""

CACHE_FRACTION = 0.92
"""Part of a device's memory that is free after loading which the KV cache takes at most."""

BLOCK_TOKENS = 16
"""Tokens of a cache block."""

STEP_TOKENS = 2048
"""Most tokens of one step: a longer prompt is computed in pieces."""

NUM_SEQUENCES = 16
"""Sequences at once for which logits are counted."""


@dataclass(frozen=True)
class CacheNeeds:
    """What one rank's cache takes. `groups`: (window or None, bytes of a block) of layers that keep the same tokens.

    `block_span`: tokens of a block, all ranks of the cp axis together.
    """

    groups: tuple[tuple[int | None, int], ...]
    state: int
    block_span: int = BLOCK_TOKENS

    @property
    def bytes_per_token(self) -> int:
        """Bytes every further token of a long sequence takes: keys and values of the layers without a window."""
        return sum(size for window, size in self.groups if window is None) // self.block_span

    @property
    def window_bytes(self) -> int:
        """Bytes that a long sequence takes in the layers with a window, and no more however long it gets."""
        return sum(self._blocks(window, 1 << 60) * size for window, size in self.groups if window is not None)

    def total(self, num_sequences: int, length: int) -> int:
        """Bytes of the cache for `num_sequences` sequences of `length` tokens."""
        blocks = sum((num_sequences * self._blocks(window, length) + 1) * size for window, size in self.groups)
        return blocks + (num_sequences + 1) * self.state

    def longest(self, budget: int, limit: int) -> int:
        """The longest single sequence, of at most `limit` tokens, that fits in `budget` bytes; 0 if none does."""
        low, high = 0, -(-limit // self.block_span)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.total(1, middle * self.block_span) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(low * self.block_span, limit)

    def sequences(self, budget: int, length: int) -> int:
        """How many sequences of `length` tokens fit in `budget` bytes at once."""
        fixed, one = self.total(0, length), self.total(1, length) - self.total(0, length)
        return max(0, (budget - fixed) // one) if one else 0

    def _blocks(self, window: int | None, length: int) -> int:
        tokens = length if window is None else min(length, window + min(STEP_TOKENS, length) + self.block_span)
        return -(-tokens // self.block_span)


@dataclass(frozen=True)
class RankFit:
    """One rank: what it needs, and what its device has left. Bytes; tokens of one sequence; sequences of full length."""

    rank: int
    weight_bytes: int
    workspace_bytes: int
    context_bytes: int
    cache: CacheNeeds
    device_bytes: int
    cache_budget: int
    longest_context: int
    max_sequences: int


@dataclass(frozen=True)
class Fit:
    """All ranks together: the rank with the least room decides."""

    fits: bool
    max_model_len: int
    longest_context: int
    max_sequences: int
    ranks: tuple[RankFit, ...]

    @property
    def tightest(self) -> RankFit:
        """The rank that decides."""
        return min(self.ranks, key=lambda r: (r.longest_context, r.max_sequences, r.cache_budget))


def fit(
    model: ModelConfig,
    axes: Mapping[str, Axis],
    weights: Sequence[int],
    itemsize: int,
    device_bytes: Sequence[int],
    max_model_len: int | None = None,
    cp_size: int = 1,
) -> Fit:
    """Whether ranks that hold `weights` bytes fit on devices of `device_bytes` (one a rank) with their cache.

    It fits when one sequence of max_model_len tokens does; without a length, when any does. `itemsize` is that of the
    plan's dtype, in which keys and values are kept too. Of each rank there are `cp_size` that share out the cache.
    """
    length = max_model_len or model.max_position
    context = CONTEXT_BYTES + (COLLECTIVE_BYTES if len(weights) * cp_size > 1 else 0)
    ranks = []
    for r, (weight, device) in enumerate(zip(weights, device_bytes, strict=True)):
        cache, workspace = cache_needs(model, axes, r, itemsize, cp_size), workspace_bytes(model, axes, r, itemsize)
        free = device - context - weight
        budget = min(int(free * CACHE_FRACTION), free - workspace)
        longest, sequences = cache.longest(budget, model.max_position), cache.sequences(budget, length)
        ranks.append(RankFit(r, weight, workspace, context, cache, device, budget, longest, sequences))
    longest = min(r.longest_context for r in ranks)
    sequences = min(r.max_sequences for r in ranks)
    fits = sequences > 0 if max_model_len is not None else longest > 0
    return Fit(fits, length, longest, sequences, tuple(ranks))


def cache_needs(model: ModelConfig, axes: Mapping[str, Axis], rank: int, itemsize: int, cp_size: int = 1) -> CacheNeeds:
    """What `rank`'s cache takes."""
    groups: Counter[int | None] = Counter()
    for layer in model.layers:
        a = layer.attention
        if a is not None and a.kv_source is None:
            groups[a.window] += BLOCK_TOKENS * 2 * _owned(axes, a.kv_axis, rank) * a.head_dim * itemsize
    return CacheNeeds(tuple(groups.items()), state_bytes(model, axes, rank, itemsize), BLOCK_TOKENS * cp_size)


def workspace_bytes(
    model: ModelConfig,
    axes: Mapping[str, Axis],
    rank: int,
    itemsize: int,
    tokens: int = STEP_TOKENS,
    sequences: int = NUM_SEQUENCES,
) -> int:
    """An estimate of what one step of `tokens` tokens, `sequences` of them sampled from, takes beside the cache."""
    widest = max(_layer_width(layer, axes, rank) for layer in model.layers)
    logits = 3 * 4 * sequences * model.vocab_size
    per_layer = 3 * len(model.layers) * model.per_layer_width
    return tokens * itemsize * (4 * model.hidden_size + widest + per_layer) + logits


def _layer_width(layer: Layer, axes: Mapping[str, Axis], rank: int) -> int:
    """Elements a token takes inside a layer."""
    ffn = 3 * _owned(axes, layer.ffn.axis, rank) * max(1, layer.ffn.experts_per_token)
    a, d = layer.attention, layer.delta_net
    if a is not None:
        return ffn + 2 * (_owned(axes, a.q_axis, rank) + 2 * _owned(axes, a.kv_axis, rank)) * a.head_dim
    assert d is not None
    keys = _owned(axes, "delta_k_heads", rank) * d.key_dim
    return ffn + 2 * (2 * keys + 2 * _owned(axes, "delta_v_heads", rank) * d.value_dim)


def rank_weights(model: ModelConfig, axes: Mapping[str, Axis], tp_size: int, itemsize: int) -> list[int]:
    """Weight bytes of every rank, without padding, from the model alone."""
    kinds = Counter((spec.shape, spec.cut) for spec in model_tensors(model))
    return [
        sum(
            count * part_bytes(rank_shape(TensorSpec("", shape, cut), axes, r), itemsize)
            for (shape, cut), count in kinds.items()
        )
        for r in range(tp_size)
    ]


def smallest_tp_size(
    model: ModelConfig, itemsize: int, device_bytes: int, max_model_len: int | None = None, cp_size: int = 1
) -> int | None:
    """The fewest equal ranks, on devices of `device_bytes` each, at which the model fits; None when no number does."""
    for n in range(1, max_tp_size(model) + 1):
        axes = model_axes(model, [1] * n)
        weights = rank_weights(model, axes, n, itemsize)
        if fit(model, axes, weights, itemsize, [device_bytes] * n, max_model_len, cp_size).fits:
            return n
    return None


def even_tp_sizes(model: ModelConfig) -> list[int]:
    """The numbers of ranks at which every rank gets equally much of every axis."""

    def is_even(n: int) -> bool:
        axes = model_axes(model, [1] * n).values()
        return all(len({b - a for a, b in axis.ranges}) == 1 for axis in axes)

    return [n for n in range(1, max_tp_size(model) + 1) if is_even(n)]


def max_tp_size(model: ModelConfig, limit: int = 1024) -> int:
    """The largest number of ranks that the model can be cut for, up to `limit`."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        try:
            model_axes(model, [1] * middle)
            low = middle
        except MgtpError:
            high = middle - 1
    return low


def propose_shares(device_bytes: Sequence[int], fixed_bytes: int) -> list[int]:
    """Shares in proportion to what devices have left after `fixed_bytes` each: the smallest numbers within 8 %.

    Heads and units are coarse, so finer shares would change little. Devices that are too small get one part.
    """
    left = [max(size - fixed_bytes, 1) for size in device_bytes]
    least = min(left)

    def shares_of(parts: int) -> list[int]:
        return [max(1, round(size * parts / least)) for size in left]

    def is_close(parts: int) -> bool:
        pairs = zip(shares_of(parts), left, strict=True)
        return all(abs(share * least / (size * parts) - 1) <= 0.08 for share, size in pairs)

    return lowest_terms(shares_of(next(filter(is_close, range(1, 17)), 16)))


def _owned(axes: Mapping[str, Axis], axis: str, rank: int) -> int:
    start, stop = axes[axis].ranges[rank]
    return stop - start
