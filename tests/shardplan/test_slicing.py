"""Which values a rank gets of a window: an invented tensor of counted values, so that every slice can be read."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgtp.shardplan import slicing
from mgtp.shardplan.plan import SourceSlice
from mgtp.shardplan.slicing import ValuesError, check_finite, convert, part_of_window, windows
from mgtp.shardplan.sources.base import TensorInfo


def counted(*shape: int) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def cut(array: np.ndarray, dim: int | None, *ranges: tuple[int, int]) -> SourceSlice:
    return SourceSlice("F32", list(array.shape), dim, list(ranges))


def test_rows_are_views() -> None:
    window = counted(4, 3)
    parts = part_of_window(window, 0, cut(counted(8, 3), 0, (1, 3)))
    assert [p.tolist() for p in parts] == [[[3, 4, 5], [6, 7, 8]]]
    assert np.shares_memory(parts[0], window)


def test_rows_of_a_later_window() -> None:
    window = counted(8, 3)[4:8]
    assert [p.tolist() for p in part_of_window(window, 4, cut(counted(8, 3), 0, (1, 5)))] == [[[12, 13, 14]]]
    assert part_of_window(window, 4, cut(counted(8, 3), 0, (0, 4))) == []


def test_columns() -> None:
    parts = part_of_window(counted(2, 4), 0, cut(counted(2, 4), 1, (1, 3)))
    assert [p.ravel().tolist() for p in parts] == [[1, 2, 5, 6]]


def test_segments_follow_one_another_inside_each_row() -> None:
    parts = part_of_window(counted(2, 6), 0, cut(counted(2, 6), 1, (0, 1), (3, 5)))
    assert [p.ravel().tolist() for p in parts] == [[0, 3, 4, 6, 9, 10]]


def test_uncut_and_scalar() -> None:
    window = counted(2, 3)
    assert part_of_window(window, 0, cut(window, None))[0] is window
    scalar = counted(1, 1)
    assert part_of_window(scalar, 0, SourceSlice("F32", [], None, []))[0] is scalar


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int | None, list[tuple[int, int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    if dim is None:
        return shape, None, []
    points = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=4)) | {0, shape[dim]})
    return shape, dim, [(a, b) for a, b in zip(points[::2], points[1::2], strict=False)]


@given(cuts(), st.integers(1, 200))
def test_windows_put_together_are_the_slice(cut_of: tuple, window_bytes: int) -> None:
    """For any shape, cut and window size: the parts of all windows, one after another, are what numpy selects."""
    shape, dim, ranges = cut_of
    whole = counted(*shape)
    flat = whole.reshape(shape[0], -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "WINDOW_BYTES", window_bytes)
        found = [
            part.ravel()
            for start, stop in windows(TensorInfo("t", "F32", shape))
            for part in part_of_window(flat[start:stop], start, SourceSlice("F32", list(shape), dim, ranges))
        ]
    wanted = whole
    if dim is not None:
        wanted = whole.take(np.concatenate([np.arange(a, b) for a, b in ranges]), axis=dim)
    assert np.concatenate(found or [np.empty(0)]).tolist() == wanted.ravel().tolist()


def test_conversion_rounds_to_nearest_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)  # halfway between two bfloat16 numbers
    assert convert(values, "BF16", "t").astype(np.float32).tolist() == [1.0, 1 + 2**-6]
    assert convert(values, "F32", "t") is values


@pytest.mark.parametrize(("kind", "dtype", "value"), [("f4", "F16", 70000.0), ("f8", "F32", -1e300)])
def test_a_value_that_becomes_inf_is_refused(kind: str, dtype: str, value: float) -> None:
    with pytest.raises(ValuesError, match="layer: the value") as caught:
        convert(np.array([1, value, 2], kind), dtype, "layer")
    assert f"{value:.6g}" in caught.value.message


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["f8", "f4", "f2", ml_dtypes.bfloat16])
def test_inf_and_nan_are_refused(bad: float, kind: object) -> None:
    values = np.zeros(1000, np.dtype(kind))  # type: ignore[call-overload]
    check_finite(values, "t")
    values[77] = bad
    with pytest.raises(ValuesError, match="t: holds Inf or NaN"):
        check_finite(values, "t")
