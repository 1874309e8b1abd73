"""Helpers of the tests that open checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.planner import match
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.sources.base import Source


def refusal(folder: Path) -> CheckpointError:
    """The error with which a checkpoint is refused, checked to be one line with a hint."""
    with pytest.raises(CheckpointError) as caught:
        match(open_source(str(folder)))
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def whole(source: Source, name: str) -> np.ndarray:
    shape = source.tensors[name].shape
    return source.rows(name, 0, shape[0]).reshape(shape)
