"""Does it fit: what a rank needs on its device, and how much context that leaves. Pure functions, nothing is measured.

memory of the device
- context            CONTEXT_BYTES, and with several ranks COLLECTIVE_BYTES
- weights            what the plan gives the rank, padding included
= free
cache budget = min(CACHE_FRACTION * free, free - workspace)

workspace = T * s * (4 H + widest layer) + 3 * 4 * S * V
            T tokens of a step, s bytes an element, H hidden size, S sequences, V vocabulary; the widest layer holds
            2 (q + 2 kv) heads * D and 3 ffn columns (of each expert that a token uses) of the rank; logits are
            float32, gathered from all ranks, sorted and turned into probabilities. With C > 1 ranks on the cp axis,
            attention across ranks comes on top: see `context_workspace_bytes`

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

from .config import Attention, Layer, ModelConfig
from .errors import MgtpError, UsageError
from .families import model_tensors
from .partition import Axis, Cut, TensorSpec, model_axes, part_bytes, rank_shape
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

KEY_CHUNK, CHUNK_NUMBERS = 1024, 1 << 26
"""Keys that attention across the ranks of a cp axis takes at least, and numbers that it has at a time otherwise."""

GATHER_BYTES, KERNEL_BYTES = 64 << 20, 1 << 30
"""Keys and values that it brings together at a time: of many sequences, and of one for the prefill kernel."""


@dataclass(frozen=True)
class StepSize:
    """What bounds a step: its tokens, the sequences sampled from, ranks on the cp axis, and the longest context."""

    tokens: int = STEP_TOKENS
    sequences: int = NUM_SEQUENCES
    cp_size: int = 1
    length: int = 0


@dataclass(frozen=True)
class CacheNeeds:
    """What one rank's cache takes. `groups`: (window or None, bytes of a block) of layers that keep the same tokens.

    `state`: bytes of a sequence's recurrent state. `block_span`: tokens of a block, all ranks of the cp axis together.
    """

    groups: tuple[tuple[int | None, int], ...]
    state: int
    block_span: int = BLOCK_TOKENS
    step_tokens: int = STEP_TOKENS

    @property
    def bytes_per_token(self) -> int:
        """Bytes every further token of a long sequence takes: keys and values of the layers without a window."""
        return sum(size for window, size in self.groups if window is None) // self.block_span

    @property
    def window_bytes(self) -> int:
        """Bytes that a long sequence takes in the layers with a window, and no more however long it gets."""
        return sum(self._blocks(window, 1 << 60) * size for window, size in self.groups if window is not None)

    def blocks(self, num_sequences: int, length: int) -> list[int]:
        """Blocks of every group for `num_sequences` sequences of `length` tokens, and one for scratch."""
        return [num_sequences * self._blocks(window, length) + 1 for window, _ in self.groups]

    def block_bytes(self, blocks: Sequence[int]) -> int:
        """Bytes of as many blocks of every group."""
        return sum(count * size for count, (_, size) in zip(blocks, self.groups, strict=True))

    def state_bytes(self, num_sequences: int) -> int:
        """Bytes of the recurrent states of `num_sequences` sequences, and of one for scratch."""
        return (num_sequences + 1) * self.state

    def total(self, num_sequences: int, length: int) -> int:
        """Bytes of the cache for `num_sequences` sequences of `length` tokens."""
        return self.block_bytes(self.blocks(num_sequences, length)) + self.state_bytes(num_sequences)

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
        tokens = length if window is None else min(length, window + min(self.step_tokens, length) + self.block_span)
        return -(-tokens // self.block_span)


@dataclass(frozen=True)
class RankFit:
    """One rank: what it needs, and what its device has left. Bytes; tokens of one sequence; sequences of full length.

    `weight_bytes` counts padding. `cache_budget` is below zero where not even the rest has room.
    """

    rank: int
    weight_bytes: int
    workspace_bytes: int
    context_bytes: int
    collective_bytes: int
    cache: CacheNeeds
    device_bytes: int
    cache_budget: int
    longest_context: int
    max_sequences: int

    @property
    def kept_back_bytes(self) -> int:
        """What CACHE_FRACTION leaves free beyond the workspace."""
        taken = self.weight_bytes + self.workspace_bytes + self.context_bytes + self.collective_bytes
        return self.device_bytes - taken - self.cache_budget


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
    collective = collective_bytes(len(weights) * cp_size)
    step, ranks = StepSize(cp_size=cp_size, length=length), []
    for r, (weight, device) in enumerate(zip(weights, device_bytes, strict=True)):
        cache, workspace = (
            cache_needs(model, axes, r, itemsize, cp_size),
            workspace_bytes(model, axes, r, itemsize, step),
        )
        budget = cache_budget(device - CONTEXT_BYTES - collective - weight, workspace)
        longest, sequences = cache.longest(budget, model.max_position), cache.sequences(budget, length)
        held = (weight, workspace, CONTEXT_BYTES, collective)
        ranks.append(RankFit(r, *held, cache, device, budget, longest, sequences))
    longest = min(r.longest_context for r in ranks)
    sequences = min(r.max_sequences for r in ranks)
    fits = sequences > 0 if max_model_len is not None else longest > 0
    return Fit(fits, length, longest, sequences, tuple(ranks))


def collective_bytes(num_ranks: int) -> int:
    """What the collectives take of a device."""
    return COLLECTIVE_BYTES if num_ranks > 1 else 0


def cache_budget(free: int, workspace: int) -> int:
    """What the cache may take of `free` bytes after loading: a step needs memory too."""
    return min(int(free * CACHE_FRACTION), free - workspace)


def cache_needs(
    model: ModelConfig,
    axes: Mapping[str, Axis],
    rank: int,
    itemsize: int,
    cp_size: int = 1,
    block_tokens: int = BLOCK_TOKENS,
    step_tokens: int = STEP_TOKENS,
) -> CacheNeeds:
    """What `rank`'s cache takes. Layers with full attention are the first group, then windows, the smallest first."""
    groups: Counter[int | None] = Counter()
    for layer in model.layers:
        a = layer.attention
        if a is not None and a.kv_source is None:
            groups[a.window] += block_tokens * 2 * _owned(axes, a.kv_axis, rank) * a.head_dim * itemsize
    ordered = sorted(groups.items(), key=lambda group: (group[0] is not None, group[0] or 0))
    return CacheNeeds(tuple(ordered), state_bytes(model, axes, rank, itemsize), block_tokens * cp_size, step_tokens)


def workspace_bytes(
    model: ModelConfig, axes: Mapping[str, Axis], rank: int, itemsize: int, step: StepSize | None = None
) -> int:
    """An estimate of what one step takes beside the cache."""
    step = step or StepSize()
    widest = max(_layer_width(layer, axes, rank) for layer in model.layers)
    logits = 3 * 4 * step.sequences * model.vocab_size
    per_layer = 3 * len(model.layers) * model.per_layer_width
    own = step.tokens * itemsize * (4 * model.hidden_size + widest + per_layer) + logits
    return own + (context_workspace_bytes(model, axes, rank, itemsize, step) if step.cp_size > 1 else 0)


def context_workspace_bytes(
    model: ModelConfig, axes: Mapping[str, Axis], rank: int, itemsize: int, step: StepSize
) -> int:
    """What the widest layer's attention across the ranks of a cp axis takes (runtime/layers/context_attention.py).

    Three copies of the step's new keys and values; then the most of what a prompt takes in the kernel (two copies of
    what the rank keeps of the longest sequence, and of all of it), in a ring where that is too much (three copies of what
    it keeps: read, stacked, received; in float32 a chunk's scores, and eight copies of the queries), and what a decode
    step takes.
    """
    length = step.length or model.max_position

    def of_layer(a: Attention) -> int:
        q, numbers = _owned(axes, a.q_axis, rank), _owned(axes, a.kv_axis, rank) * a.head_dim
        seen = length if a.window is None else min(length, a.window + step.tokens)
        keys, queries = -(-seen // step.cp_size), q * -(-step.tokens // step.cp_size)
        token = 2 * numbers * itemsize
        gathered = min(token * seen, KERNEL_BYTES)
        kernel = 2 * gathered // step.cp_size + 2 * gathered
        ring = 3 * token * keys + _chunk_bytes(queries, numbers, keys) + 8 * 4 * queries * a.head_dim
        at_once = max(1, min(step.sequences, GATHER_BYTES // (token * keys)))
        decode = at_once * token * keys + _chunk_bytes(at_once * q, at_once * numbers, keys)
        goes_round = token * seen > KERNEL_BYTES or itemsize > 4  # which the kernel does not take
        return 3 * token * min(step.tokens, length) + max(kernel, ring if goes_round else 0, decode)

    return max((of_layer(layer.attention) for layer in model.layers if layer.attention is not None), default=0)


def _chunk_bytes(queries: int, numbers: int, keys: int) -> int:
    """Three copies of the scores of `queries` for a chunk of keys, and keys and values of `numbers` each, in float32."""
    size = min(keys, max(KEY_CHUNK, CHUNK_NUMBERS // max(queries, numbers)))
    return 4 * size * (3 * queries + 2 * numbers)


def _layer_width(layer: Layer, axes: Mapping[str, Axis], rank: int) -> int:
    """Elements a token takes inside a layer."""
    ffn = 3 * _owned(axes, layer.ffn.axis, rank) * max(1, layer.ffn.experts_per_token)
    a, d = layer.attention, layer.delta_net
    if a is not None:
        return ffn + 2 * (_owned(axes, a.q_axis, rank) + 2 * _owned(axes, a.kv_axis, rank)) * a.head_dim
    assert d is not None
    keys = _owned(axes, "delta_k_heads", rank) * d.key_dim
    return ffn + 2 * (2 * keys + 2 * _owned(axes, "delta_v_heads", rank) * d.value_dim)


WeightKinds = Counter[tuple[tuple[int, ...], Cut | None]]
"""How many tensors of a model have which shape and cut."""


def weight_kinds(model: ModelConfig) -> WeightKinds:
    """The kinds of `model`'s tensors: there may be thousands of tensors, but few kinds."""
    return Counter((spec.shape, spec.cut) for spec in model_tensors(model))


def rank_weights(kinds: WeightKinds, axes: Mapping[str, Axis], tp_size: int, itemsize: int) -> list[int]:
    """Weight bytes of every rank, without padding, from the model alone."""
    return [
        sum(
            count * part_bytes(rank_shape(TensorSpec("", shape, cut), axes, r), itemsize)
            for (shape, cut), count in kinds.items()
        )
        for r in range(tp_size)
    ]


def check_cp_size(cp_size: int, max_position: int, block_tokens: int = BLOCK_TOKENS) -> None:
    """Raise UsageError where some ranks would hold no token of even the longest sequence that the model takes.

    Of shorter ones, some may hold none: that is so of every short prompt.
    """
    most = max(1, -(-max_position // block_tokens))
    if cp_size > most:
        raise UsageError(
            f"--cp-size {cp_size}: {max_position} tokens in blocks of {block_tokens} are {most} to share out",
            f"use --cp-size {most} or less",
        )


def smallest_tp_size(
    model: ModelConfig, itemsize: int, device_bytes: int, max_model_len: int | None = None, cp_size: int = 1
) -> int | None:
    """The fewest equal ranks, on devices of `device_bytes` each, at which the model fits; None when no number does."""
    kinds = weight_kinds(model)
    for n in range(1, max_tp_size(model) + 1):
        axes = model_axes(model, [1] * n)
        weights = rank_weights(kinds, axes, n, itemsize)
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


def _owned(axes: Mapping[str, Axis], axis: str, rank: int) -> int:
    start, stop = axes[axis].ranges[rank]
    return stop - start
