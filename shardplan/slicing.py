"""Values on their way from a checkpoint into rank files: windows of rows, a rank's part of a window, the dtype.

A tensor is seen as [shape[0], product of the rest]; a scalar counts as one row of one value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .dtypes import COMMON_NAME, ITEMSIZE, all_finite, numpy_dtype
from .errors import CheckpointError
from .plan import SourceSlice

if TYPE_CHECKING:
    from .sources.base import TensorInfo

WINDOW_BYTES = 2 << 20
"""Bytes of source values that are handled at once; a single row that is larger is one window.

Small enough for a window to stay in a core's cache from the read to the write, and for its memory to be used again
instead of being given back to the system: 8 MiB cost three times the system time, 512 KiB twice the interpreter's.
"""


class ValuesError(CheckpointError):
    """The weights themselves are not acceptable: reading them again would not help."""


def windows(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Half-open row ranges that cover a tensor, each of about WINDOW_BYTES."""
    num_rows = info.shape[0] if info.shape else 1
    row_bytes = math.prod(info.shape[1:]) * ITEMSIZE[info.dtype]
    step = max(1, WINDOW_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def source_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor's values as the source gives them."""
    return math.prod(info.shape) * ITEMSIZE[info.dtype]


def part_of_window(window: np.ndarray, start: int, source: SourceSlice) -> list[np.ndarray]:
    """What a rank stores of `window`, the rows from `start` on [rows, rest]: contiguous arrays in stored order.

    Over all windows in turn, the arrays put one after another are the rank's tensor. Cuts along dimension 0 give
    views, others copies.
    """
    if source.dim is None:
        return [window]
    if source.dim == 0:
        stop = start + len(window)
        overlaps = ((max(a, start), min(b, stop)) for a, b in source.ranges)
        return [window[a - start : b - start] for a, b in overlaps if a < b]
    before, size = math.prod(source.shape[1 : source.dim]), source.shape[source.dim]
    inside = window.reshape(len(window) * before, size, math.prod(source.shape[source.dim + 1 :]))
    parts = [inside[:, a:b] for a, b in source.ranges]
    return [np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=1)]


def convert(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """`values` in the safetensors dtype `dtype`, rounded to nearest even; finite values stay finite.

    Raises ValuesError naming the tensor when a value is too large for `dtype`.
    """
    wanted = numpy_dtype(dtype)
    if values.dtype == wanted:
        return values
    with np.errstate(over="ignore"):
        converted = values.astype(wanted)
    if not all_finite(converted):
        raise ValuesError(
            f"{name}: the value {_largest(values):.6g} is too large for {COMMON_NAME[dtype]}",
            "use --dtype bfloat16 or float32, which have a larger range",
        )
    return converted


def check_finite(values: np.ndarray, name: str) -> None:
    """Raise ValuesError naming the tensor when it holds Inf or NaN."""
    if not all_finite(values):
        raise ValuesError(
            f"{name}: holds Inf or NaN", "the weights are damaged: take them from the model's repository again"
        )


def as_bytes(values: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return values.reshape(-1).view(np.uint8).data


def _largest(values: np.ndarray) -> float:
    return max((float(values.max()), float(values.min())), key=abs)
