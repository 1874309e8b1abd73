"""The device mesh: binding a device, joining the other ranks, and one communicator a mesh axis."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .communicator import Communicator, GroupCommunicator, HostCommunicator, SingleRank
from .options import RankOptions


def bind_device(options: RankOptions, local_rank: int) -> torch.device:
    """Make this rank's device the current one, before anything else touches CUDA."""
    if options.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    device = torch.device("cuda", options.devices[local_rank])
    torch.cuda.set_device(device)
    torch.cuda.init()
    return device


def axis_groups(sizes: Mapping[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """The groups of ranks along every axis. The first axis varies fastest: its groups are neighbours.

    {"tp": 2, "cp": 2} -> {"tp": [(0, 1), (2, 3)], "cp": [(0, 2), (1, 3)]}
    """
    world, stride, groups = math.prod(sizes.values()), 1, {}
    for axis, size in sizes.items():
        firsts = [rank for rank in range(world) if rank // stride % size == 0]
        groups[axis] = [tuple(range(first, first + stride * size, stride)) for first in firsts]
        stride *= size
    return groups


@dataclass(frozen=True)
class Mesh:
    """This rank's communicators, one a mesh axis."""

    axes: Mapping[str, Communicator]

    @property
    def tp(self) -> Communicator:
        """The axis over which weights are cut."""
        return self.axes["tp"]


def join(options: RankOptions, rank: int, device: torch.device, folder: Path) -> Mesh:
    """Meet the other ranks through a file in the run's folder, and make every axis' communicator.

    NCCL refuses two ranks on one device: those exchange through the host. All ranks make all groups, in one order.
    """
    sizes = {"tp": options.tp_size}
    if math.prod(sizes.values()) == 1:
        return Mesh(dict.fromkeys(sizes, SingleRank()))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=math.prod(sizes.values()),
        timeout=_timeout(options),
    )
    made: dict[tuple[int, ...], Communicator] = {}
    axes: dict[str, Communicator] = {}
    for axis, groups in axis_groups(sizes).items():
        for ranks in groups:
            if ranks not in made:  # groups of the same ranks share
                made[ranks] = _communicator(ranks, options, device)
            if rank in ranks:
                axes[axis] = made[ranks]
    return Mesh(axes)


def _communicator(ranks: tuple[int, ...], options: RankOptions, device: torch.device) -> Communicator:
    """The communicator of `ranks`; of use only to them, but all ranks must make it."""
    if len(ranks) == 1:
        return SingleRank()
    devices = [options.devices[rank] for rank in ranks] if device.type == "cuda" else []
    backend = "nccl" if devices and len(set(devices)) == len(ranks) else "gloo"
    group = dist.new_group(list(ranks), timeout=_timeout(options), backend=backend)
    if not isinstance(group, dist.ProcessGroup):
        return SingleRank()  # other ranks' group
    return GroupCommunicator(group) if backend == "nccl" else HostCommunicator(group)


def _timeout(options: RankOptions) -> datetime.timedelta:
    return datetime.timedelta(seconds=options.start_timeout)


def leave() -> None:
    """Leave the process groups together, after success; after a failure a rank just exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
