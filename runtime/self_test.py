"""Whether the collectives of a group work, seen before anything is loaded: on known numbers, with known answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..shardplan.errors import RankError
from .communicator import Communicator

ELEMENTS = 4096

LEAST_SHARE = 0.9
"""Of the most free memory of any rank: with less, a device is in use by something else."""


def check_collectives(communicator: Communicator, device: torch.device) -> None:
    """Exchange small tensors and compare with what must come out; raises RankError naming what was wrong.

    A collective that does not come back is the front's to notice: the stage has a time limit.
    """
    rank, size = communicator.rank, communicator.size
    # Whole numbers below 2**24: exact in float32, whatever the order of the sum.
    ours = torch.arange(ELEMENTS, dtype=torch.float32, device=device) + rank
    ranks = torch.arange(size, dtype=torch.float32, device=device)
    every = torch.arange(ELEMENTS, dtype=torch.float32, device=device) + ranks[:, None]
    _compare("all-reduce", communicator, communicator.all_reduce(ours.clone()), every.sum(0))
    _compare("all-gather", communicator, communicator.all_gather(ours), every)
    _compare("broadcast", communicator, communicator.broadcast(ours.clone()), every[0])
    _compare("ring shift", communicator, communicator.shift(ours), every[rank - 1])


def unequal_memory(free: Sequence[int]) -> str | None:
    """What to say of ranks whose devices have much less free memory than the others' before loading; None if none has."""
    low = [rank for rank, size in enumerate(free) if size < LEAST_SHARE * max(free)]
    if not low:
        return None
    sizes = ", ".join(f"rank {rank} {free[rank] / 2**30:.1f} GiB" for rank in low)
    most = f"{max(free) / 2**30:.1f} GiB"
    return f"less free memory than elsewhere ({most}): {sizes}: something else is there, all ranks get a smaller cache"


def _compare(name: str, communicator: Communicator, found: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = int((found != expected).sum())
    if wrong:
        raise RankError(
            f"{name} over {communicator.size} ranks ({communicator.backend}): {wrong} of {expected.numel()} numbers are wrong",
            "links between GPUs that lose writes do this (IOMMU, ACS): try NCCL_P2P_DISABLE=1",
        )
