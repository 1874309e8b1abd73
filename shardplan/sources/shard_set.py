"""A shard set as a source, to cut it again for another number of ranks.

Every tensor is put together from the ranks' slices, so that the result is what cutting the checkpoint would give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dtypes import numpy_dtype
from ..plan import PLAN_FILE, RankPlan, ShardPlan, SourceSlice, TensorPlan
from ..shard_set import ShardSet
from .base import TensorInfo
from .files import FileStamp, identity_of, open_regular, read_rows

if TYPE_CHECKING:
    import numpy as np


Slice = tuple[int, TensorPlan, SourceSlice]
"""A rank, what it stores of a tensor, and where that came from."""


@dataclass(frozen=True)
class Piece:
    """Indices [start, stop) of a tensor along `dim`: rank `rank` stores them from its own index `at` on."""

    dim: int
    start: int
    stop: int
    rank: int
    tensor: TensorPlan
    at: int


@dataclass(eq=False)
class ShardSetSource:
    """A Source over the rank files of a shard set; `pieces` lists each tensor's slices in the order of the tensor."""

    label: str
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    notes: Sequence[str]
    fingerprint: str | None
    ranks: Mapping[int, tuple[Path, RankPlan]]
    pieces: Mapping[str, Sequence[Piece]]
    stamps: Mapping[str, FileStamp]
    has_weights: bool = True

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the whole tensor seen as [shape[0], product of the rest]."""
        import numpy as np

        info, pieces = self.tensors[name], self.pieces[name]
        shape = info.shape or (1,)
        whole = np.empty((stop - start, *shape[1:]), numpy_dtype(info.dtype))
        for piece in pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if piece.dim:
                before, size = (slice(None),) * piece.dim, piece.stop - piece.start
                part = self._read(piece, start, stop)[(*before, slice(piece.at, piece.at + size))]
                whole[(*before, slice(piece.start, piece.stop))] = part
            elif low < high:
                shift = piece.at - piece.start
                whole[low - start : high - start] = self._read(piece, low + shift, high + shift)
        return whole.reshape(stop - start, math.prod(shape[1:]))

    def _read(self, piece: Piece, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of what the piece's rank stores of the tensor, in its own shape."""
        path, plan = self.ranks[piece.rank]
        tensor = piece.tensor
        shape = tuple(tensor.shape) or (1,)
        offset = plan.data_offset + tensor.offset
        return read_rows(path, self.stamps[path.name], offset, tensor.dtype, shape, (start, stop))

    def identity(self) -> str:
        """A digest of the names, inodes, sizes and mtimes, as they were when the set was opened."""
        return identity_of(self.stamps)

    def close(self) -> None:
        """Nothing is held open."""


def open_shard_set(path: Path, label: str) -> ShardSetSource:
    """Open a shard set with all its rank files; raises CheckpointError for anything that is wrong with them."""
    shard_set = ShardSet.open(path)
    plan = shard_set.plan
    ranks = {rank.rank: (shard_set.rank_path(rank.rank), rank) for rank in plan.ranks}
    stamps = {}
    for file in [path / PLAN_FILE, *(file for file, _ in ranks.values())]:
        with open_regular(file) as (_, stamp):
            stamps[file.name] = stamp
    held = _by_name(plan)
    return ShardSetSource(
        label=label,
        config=_config_in_force(shard_set.config, plan),
        files=shard_set.model_files(),
        tensors={name: _info(name, *slices[0][1:]) for name, slices in held.items()},
        notes=list(plan.notes),
        fingerprint=plan.fingerprint or None,
        ranks=ranks,
        pieces={name: _pieces(slices) for name, slices in held.items()},
        stamps=stamps,
    )


def _by_name(plan: ShardPlan) -> dict[str, list[Slice]]:
    """Every tensor's slices in rank order; padding is left out."""
    held: dict[str, list[Slice]] = {}
    for rank in plan.ranks:
        for tensor in rank.tensors:
            if tensor.source is not None:
                held.setdefault(tensor.name, []).append((rank.rank, tensor, tensor.source))
    return held


def _info(name: str, tensor: TensorPlan, source: SourceSlice) -> TensorInfo:
    origin = source.dtype if source.dtype != tensor.dtype else ""
    return TensorInfo(name, tensor.dtype, tuple(source.shape), origin)


def _pieces(slices: Sequence[Slice]) -> list[Piece]:
    """What makes up a whole tensor, each index from the first rank that has it (kv heads may be copied).

    A set that was opened has been checked: its slices cover the tensor without gaps.
    """
    source = slices[0][2]
    if source.dim is None:
        return [Piece(0, 0, source.shape[0] if source.shape else 1, *slices[0][:2], 0)]
    found = []
    for rank, tensor, cut in slices:
        at = 0
        for start, stop in cut.ranges:
            found.append(Piece(source.dim, start, stop, rank, tensor, at))
            at += stop - start
    pieces, end = [], 0
    for piece in sorted(found, key=lambda p: (p.start, p.rank)):
        if piece.stop > end:
            pieces.append(replace(piece, start=end, at=piece.at + end - piece.start))
            end = piece.stop
    return pieces


def _config_in_force(config: Mapping[str, Any], plan: ShardPlan) -> Mapping[str, Any]:
    """The config with the tie that the plan decided on.

    A checkpoint may be flagged as tied and still have a head of its own. After conversion head and embedding can be
    equal, so this cannot be decided again from the values.
    """
    if plan.ties:
        return config
    text = config.get("text_config")
    nested = {"text_config": {**text, "tie_word_embeddings": False}} if isinstance(text, dict) else {}
    return {**config, **nested, "tie_word_embeddings": False}
