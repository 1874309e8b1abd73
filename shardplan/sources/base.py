"""What the planner and the writer need of a checkpoint, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: Hugging Face name, safetensors float dtype of its values, shape.

    `origin` is the dtype that the original checkpoint has, where that is another one: a shard set holds values that
    were converted. A plan records it, so that cutting a shard set again gives the plan of the checkpoint.
    `is_quantised` tells that fewer bits are stored than `dtype` has: the values were dequantised.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: str = ""
    is_quantised: bool = False


class Source(Protocol):
    """An opened checkpoint: headers read and checked in full, no weights read yet.

    `label` is what the user typed; `config` the content of config.json (rebuilt for GGUF); `files` the small files
    that a shard set carries along, name -> content; `tensors` every tensor by Hugging Face name; `notes` one line
    for everything that was ignored or repaired. `fingerprint` is a digest of the content where it is known without
    reading the weights (the hub's sha256, a shard set's plan), else None. `has_weights` is false where only headers
    were fetched: `rows` then raises.
    """

    label: str
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    notes: Sequence[str]
    fingerprint: str | None
    has_weights: bool

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor seen as [shape[0], product of the rest], as a fresh contiguous 2-D array.

        A scalar counts as one row. Raises CheckpointError when the bytes cannot be read.
        """
        ...

    def identity(self) -> str:
        """A cheap key that changes when the content may have changed: paths, inodes, sizes, mtimes."""
        ...

    def close(self) -> None:
        """Release files."""
        ...
