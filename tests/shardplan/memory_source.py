"""A checkpoint that lies in memory: sources for tests of the planner and the writer that need no files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mgtp.shardplan.dtypes import numpy_dtype
from mgtp.shardplan.sources.base import TensorInfo
from tests.tiny import llama_config, llama_tensors

_NAMES = {numpy_dtype(name): name for name in ("F64", "F32", "F16", "BF16")}


class MemorySource:
    """A Source over arrays. `reads` lists every window that was read, in order."""

    def __init__(self, config: Mapping[str, Any], arrays: dict[str, np.ndarray], fingerprint: str | None = None):
        self.label = "memory:model"
        self.config = config
        self.files: Mapping[str, bytes] = {"config.json": json.dumps(config).encode()}
        self.arrays = arrays
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, _NAMES[a.dtype], a.shape) for name, a in arrays.items()
        }
        self.notes: Sequence[str] = ()
        self.fingerprint = fingerprint
        self.has_weights = True
        self.reads: list[tuple[str, int, int]] = []

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        self.reads.append((name, start, stop))
        array = self.arrays[name]
        shape = (array.shape[0], math.prod(array.shape[1:])) if array.shape else (1, 1)
        return array.reshape(shape)[start:stop].copy()

    def identity(self) -> str:
        return "memory"

    def close(self) -> None:
        pass


def llama_source(dtype: str = "float32", seed: int = 0, **changes: Any) -> MemorySource:
    """A tiny Llama in memory; `changes` go into its config."""
    config = llama_config(**changes)
    return MemorySource(config, llama_tensors(config, dtype, seed))
