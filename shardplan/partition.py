"""How a tensor is cut: which slice of the source each rank owns. Pure functions of names, shapes and ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import ModelConfig
from .errors import UsageError
from .sharing import Range, aligned_unit, share_heads, share_size


@dataclass(frozen=True)
class Axis:
    """A model axis shared out over the ranks: rank r owns units [ranges[r][0], ranges[r][1]) of `size`.

    Ranges are disjoint and cover the axis, but for copied heads (`copied`), where neighbours may repeat a unit.
    """

    size: int
    unit: int
    ranges: tuple[Range, ...]
    copied: bool = False


@dataclass(frozen=True)
class Segment:
    """A run of rows (or columns) that follows one axis: unit u covers [offset + u*block, offset + (u+1)*block)."""

    axis: str
    block: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Cut:
    """A tensor cut along `dim`: a rank's part is its slices of all segments, one after another."""

    dim: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model: canonical name, full shape, how it is cut (None: every rank has all of it).

    Neighbours with the same `fuse` label are stored without padding between them, so that the runtime can view them
    as one matrix.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    fuse: str = ""


def rows(axis: str, block: int = 1) -> Cut:
    """Cut along dimension 0 in blocks of `block` rows a unit."""
    return Cut(0, (Segment(axis, block),))


def columns(axis: str, block: int = 1) -> Cut:
    """Cut along dimension 1 in blocks of `block` columns a unit."""
    return Cut(1, (Segment(axis, block),))


def segmented(dim: int, *segments: tuple[str, int], sizes: Mapping[str, int]) -> Cut:
    """A packed tensor: segments (axis, block) lie one after another along `dim`; `sizes` gives each axis' units."""
    built, offset = [], 0
    for axis, block in segments:
        built.append(Segment(axis, block, offset))
        offset += sizes[axis] * block
    return Cut(dim, tuple(built))


def source_ranges(cut: Cut, axes: Mapping[str, Axis], rank: int) -> list[Range]:
    """The half-open index ranges along `cut.dim` that `rank` owns, in the order in which it stores them."""
    ranges: list[Range] = []
    for segment in cut.segments:
        start, stop = axes[segment.axis].ranges[rank]
        begin, end = segment.offset + start * segment.block, segment.offset + stop * segment.block
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return ranges


def rank_shape(spec: TensorSpec, axes: Mapping[str, Axis], rank: int) -> tuple[int, ...]:
    """The shape of `rank`'s part of a tensor."""
    if spec.cut is None:
        return spec.shape
    size = sum(b - a for a, b in source_ranges(spec.cut, axes, rank))
    return (*spec.shape[: spec.cut.dim], size, *spec.shape[spec.cut.dim + 1 :])


def model_axes(model: ModelConfig, weights: Sequence[int]) -> dict[str, Axis]:
    """Every axis of `model`, shared out over len(weights) ranks in proportion to `weights`.

    Raises UsageError, naming the axis and its size, when there are more ranks than units.
    """
    axes: dict[str, Axis] = {}
    for layer in model.layers:
        if layer.attention is not None:
            a = layer.attention
            _add_heads(axes, a.q_axis, a.num_heads, a.kv_axis, a.num_kv_heads, weights)
        if layer.delta_net is not None:
            d = layer.delta_net
            _add_heads(axes, "delta_v_heads", d.num_value_heads, "delta_k_heads", d.num_key_heads, weights)
        _add_size(axes, layer.ffn.axis, layer.ffn.size, weights)
    for name, size in (("vocab", model.vocab_size), *model.extra_axes):
        _add_size(axes, name, size, weights)
    return axes


def _add_heads(axes: dict[str, Axis], q: str, num_q: int, kv: str, num_kv: int, weights: Sequence[int]) -> None:
    if q in axes:
        return
    _check_enough(q, num_q, weights)
    q_ranges, kv_ranges = share_heads(num_q, num_kv, weights)
    axes[q] = Axis(num_q, 1, tuple(q_ranges))
    axes[kv] = Axis(num_kv, 1, tuple(kv_ranges), copied=len(weights) > num_kv)


def _add_size(axes: dict[str, Axis], name: str, size: int, weights: Sequence[int]) -> None:
    if name in axes:
        return
    _check_enough(name, size, weights)
    unit = aligned_unit(size, len(weights))
    axes[name] = Axis(size, unit, tuple(share_size(size, unit, weights)))


def _check_enough(name: str, size: int, weights: Sequence[int]) -> None:
    if len(weights) > size:
        raise UsageError(
            f"--tp-size {len(weights)} is more than the model's {size} {name.replace('_', ' ')}",
            f"use --tp-size {size} or less",
        )


def part_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * itemsize
