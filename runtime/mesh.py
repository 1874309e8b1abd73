"""The device mesh: binding a device, joining the other ranks, and one communicator a mesh axis.

Usable alone, under torchrun or beside a process group that is there already:

    mesh = create_mesh(mesh_sizes(num_ranks=8, num_kv_heads=2))      # {"tp": 2, "cp": 4}
    mesh.tp.all_reduce(x), mesh.cp.rank
    mesh.close()                                                     # what create_mesh has made, no more
"""

from __future__ import annotations

import datetime
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..shardplan.errors import UsageError
from .communicator import Communicator, GroupCommunicator, HostCommunicator, SingleRank
from .mesh_sizes import axis_groups, mesh_sizes
from .options import RankOptions

__all__ = ["BACKENDS", "Mesh", "axis_groups", "bind_device", "create_mesh", "join", "mesh_sizes"]

BACKENDS = ("nccl", "host")
"""What can run an axis' collectives: NCCL on GPUs of their own, or gloo through the host's memory, anywhere."""


def bind_device(options: RankOptions, local_rank: int) -> torch.device:
    """Make this rank's device the current one, before anything else touches CUDA."""
    if options.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    device = torch.device("cuda", options.devices[local_rank])
    torch.cuda.set_device(device)
    torch.cuda.init()
    return device


@dataclass(frozen=True)
class Mesh:
    """This rank's communicators, one a mesh axis. `made` are the process groups that end with the mesh."""

    axes: Mapping[str, Communicator]
    made: tuple[dist.ProcessGroup, ...] = ()
    made_world: bool = False

    @property
    def tp(self) -> Communicator:
        """The axis over which weights are cut."""
        return self.axes["tp"]

    @property
    def cp(self) -> Communicator:
        """The axis over which sequences are shared out. Its ranks hold the same weights."""
        return self.axes["cp"]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the first of all ranks, in place."""
        return self.tp.broadcast(self.cp.broadcast(tensor))

    def close(self) -> None:
        """Leave the process groups together, after success; after a failure a rank just exits."""
        if self.made_world:
            dist.destroy_process_group()
            return
        for group in self.made:
            dist.destroy_process_group(group)


def join(options: RankOptions, rank: int, device: torch.device, folder: Path) -> Mesh:
    """Meet the other ranks of a run through a file in its folder."""
    sizes = {"tp": options.tp_size, "cp": options.cp_size}
    timeout = options.collective_timeout
    return create_mesh(sizes, device, init_method=f"file://{folder}/rendezvous", rank=rank, timeout=timeout)


def create_mesh(
    sizes: Mapping[str, int],
    device: torch.device | None = None,
    *,
    backends: Mapping[str, str] | None = None,
    init_method: str = "env://",
    rank: int = -1,
    timeout: float = 600.0,
) -> Mesh:
    """A communicator for every axis of `sizes`. All ranks call it alike.

    A process group that is there is used, else one is started: by torchrun's environment, or by `init_method` and
    `rank`. `device` is this rank's (None: the current GPU, or the CPU). `backends` names what runs an axis' collectives;
    left out, NCCL does where all ranks have GPUs of their own, the host otherwise: NCCL refuses two ranks on one.
    Raises UsageError when the sizes' product is not the number of ranks.
    """
    world = math.prod(sizes.values())
    made_world = not dist.is_initialized() and world > 1
    limit = datetime.timedelta(seconds=timeout)
    if made_world:
        _check_world(sizes, int(os.environ.get("WORLD_SIZE", world)) if init_method == "env://" else world)
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world, timeout=limit)
    elif dist.is_initialized():
        _check_world(sizes, dist.get_world_size())
    if world == 1:
        return Mesh(dict.fromkeys(sizes, SingleRank()))
    places = _places(device, world)
    made: dict[tuple[tuple[int, ...], str], Communicator] = {}
    axes: dict[str, Communicator] = {}
    for axis, groups in axis_groups(sizes).items():
        for ranks in groups:
            backend = _backend(axis, [places[r] for r in ranks], (backends or {}).get(axis))
            if (ranks, backend) not in made:  # groups of the same ranks share
                made[ranks, backend] = _communicator(ranks, backend, limit)
            if dist.get_rank() in ranks:
                axes[axis] = made[ranks, backend]
    groups = [c.group for c in made.values() if isinstance(c, GroupCommunicator)]
    return Mesh(axes, tuple(groups), made_world)


def _check_world(sizes: Mapping[str, int], num_ranks: int) -> None:
    if math.prod(sizes.values()) != num_ranks:
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UsageError(
            f"a mesh of {shape} has {math.prod(sizes.values())} ranks, {num_ranks} are there",
            "choose sizes with that product (see mesh_sizes)",
        )


def _places(device: torch.device | None, world: int) -> list[tuple[str, str]]:
    """(host, device) of every rank."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    places: list[tuple[str, str]] = [("", "")] * world
    dist.all_gather_object(places, (socket.gethostname(), str(device)))
    return places


def _backend(axis: str, places: list[tuple[str, str]], asked: str | None) -> str:
    """What runs a group's collectives; raises UsageError when that cannot be what was asked for."""
    if asked is not None and asked not in BACKENDS:
        raise UsageError(f"axis {axis}: backend {asked!r} is unknown", f"use {' or '.join(BACKENDS)}")
    alone = len(set(places)) == len(places) and all(device.startswith("cuda") for _, device in places)
    if asked == "nccl" and not alone:
        raise UsageError(
            f"axis {axis}: nccl needs a GPU for every rank, they have {', '.join(device for _, device in places)}",
            "use the host backend",
        )
    return asked or ("nccl" if alone else "host")


def _communicator(ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta) -> Communicator:
    """The communicator of `ranks`; of use only to them, but all ranks must make it."""
    if len(ranks) == 1:
        return SingleRank()
    group = dist.new_group(list(ranks), timeout=timeout, backend="nccl" if backend == "nccl" else "gloo")
    if not isinstance(group, dist.ProcessGroup):
        return SingleRank()  # other ranks' group
    return GroupCommunicator(group) if backend == "nccl" else HostCommunicator(group)
