"""A rank's weights: its own file, brought over as one block, with every tensor a view into it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from io import BufferedReader
from itertools import pairwise
from pathlib import Path

import torch

from ..shardplan.dtypes import COMMON_NAME
from ..shardplan.errors import CheckpointError
from ..shardplan.names import canonical_name
from ..shardplan.plan import RankPlan, TensorPlan

TORCH_DTYPE = {name: getattr(torch, name) for name in COMMON_NAME.values()}


class Weights:
    """The tensors of one rank by canonical name, as views into one block of bytes in the file's order.

    `take` hands a tensor out once, so that `check_all_used` can tell what a model forgot.
    """

    def __init__(self, block: torch.Tensor, plan: RankPlan) -> None:
        self.block = block
        self._plans = {canonical_name(t.name): t for t in plan.tensors if t.source is not None}
        self._unused = set(self._plans)

    def __contains__(self, name: str) -> bool:
        return name in self._plans

    def take(self, *names: str) -> torch.Tensor:
        """The tensor `names[0]`, or several that lie one after another as one tensor, joined along dimension 0."""
        plans = [self._plans[name] for name in names]
        for before, after in pairwise(plans):
            if before.offset + before.bytes != after.offset or before.shape[1:] != after.shape[1:]:
                raise ValueError(f"{before.name} and {after.name} do not lie side by side")
        self._unused.difference_update(names)
        rows = sum(p.shape[0] for p in plans)
        return self._view(plans[0], sum(p.bytes for p in plans), (rows, *plans[0].shape[1:]))

    def take_if_present(self, *names: str) -> torch.Tensor | None:
        """`take`, or None when the first name is not in the file."""
        return self.take(*names) if names[0] in self else None

    def check_all_used(self) -> None:
        """Raise when the model left tensors of the file unused."""
        if self._unused:
            raise RuntimeError(f"weights that no layer uses: {', '.join(sorted(self._unused))}")

    def _view(self, plan: TensorPlan, size: int, shape: Sequence[int]) -> torch.Tensor:
        dtype = TORCH_DTYPE[COMMON_NAME[plan.dtype]]
        return self.block[plan.offset : plan.offset + size].view(dtype).view(tuple(shape))


def map_file(path: Path, plan: RankPlan) -> torch.Tensor:
    """The data section of a rank file as a CPU tensor of bytes, mapped in place: nothing is read or copied yet.

    Raises CheckpointError when the file's size is not the plan's: a short mapping would end in SIGBUS.
    """
    with open_checked(path, plan) as file:
        length = plan.bytes - plan.data_offset
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        # A private mapping is writable, as torch demands, without ever touching the file.
        view = mmap.mmap(
            file.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=plan.data_offset
        )
    return torch.frombuffer(view, dtype=torch.uint8)


def open_checked(path: Path, plan: RankPlan) -> BufferedReader:
    """`path`, opened for reading; raises CheckpointError unless it has the size that the plan records."""
    try:
        file = path.open("rb")
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", "check the path, or shard the checkpoint again") from None
    if size != plan.bytes:
        file.close()
        raise CheckpointError(
            f"{path}: {size} bytes, the plan says {plan.bytes}", "copy the file again, or shard the checkpoint again"
        )
    return file


def read_to_device(path: Path, plan: RankPlan, device: torch.device, limit: int | None = None) -> torch.Tensor:
    """The data section of a rank file, or its first `limit` bytes, as one block of bytes on a GPU."""
    from .loader import load_block

    length = plan.bytes - plan.data_offset
    with open_checked(path, plan) as file:
        return load_block(file.fileno(), plan.data_offset, length if limit is None else min(limit, length), device)
