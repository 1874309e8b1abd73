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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..shardplan.errors import UsageError
from ..shardplan.values import counted
from .collectives.groups import AxisGroup, Rank, node_name
from .collectives.request import BACKENDS, parse_collective
from .communicator import Communicator, SingleRank
from .mesh_sizes import axis_groups, mesh_sizes
from .messages import AxisInfo
from .options import RankOptions
from .threads import asked_threads

__all__ = ["Mesh", "axis_groups", "bind_device", "create_mesh", "join", "mesh_sizes"]


def bind_device(options: RankOptions, local_rank: int) -> torch.device:
    """Make this rank's device the current one, before anything else touches CUDA."""
    if options.device == "cpu":
        torch.set_num_threads(asked_threads() or 1)
        return torch.device("cpu")
    device = torch.device("cuda", options.devices[local_rank])
    torch.cuda.set_device(device)
    torch.cuda.init()
    return device


@dataclass(frozen=True)
class Mesh:
    """This rank's communicators, one a mesh axis, and why each runs on its backend.

    `made` are the process groups that end with the mesh.
    """

    axes: Mapping[str, Communicator]
    reasons: Mapping[str, str] = field(default_factory=dict)
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

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, *tensor.shape]: the tensor of every rank of the mesh, in the order of their numbers."""
        shape = tensor.shape
        for communicator in self.axes.values():  # the first axis varies fastest
            tensor = communicator.all_gather(tensor)
        return tensor.reshape(-1, *shape)

    def describe(self) -> list[AxisInfo]:
        """Sizes and backends, as logs, probe and /metrics show them."""
        return [AxisInfo(axis, c.size, c.backend, self.reasons.get(axis, "")) for axis, c in self.axes.items()]

    def close(self) -> None:
        """Give back what communicators hold, the last made first, and leave the process groups together.

        After success only: after a failure a rank just exits.
        """
        for communicator in reversed(list({id(c): c for c in self.axes.values()}.values())):
            if close := getattr(communicator, "close", None):
                close()
        if self.made_world:
            dist.destroy_process_group()
            return
        for group in self.made:
            dist.destroy_process_group(group)


def join(options: RankOptions, rank: int, device: torch.device, folder: Path) -> Mesh:
    """Meet the other ranks of a run where its options say, or through a file in its folder."""
    sizes = {"tp": options.tp_size, "cp": options.cp_size}
    return create_mesh(
        sizes,
        device,
        backends=parse_collective(options.collective, list(sizes)),
        allow_shared_device=options.allow_shared_device,
        init_method=options.rendezvous or f"file://{folder}/rendezvous",
        rank=rank,
        timeout=options.collective_timeout,
    )


def create_mesh(
    sizes: Mapping[str, int],
    device: torch.device | None = None,
    *,
    backends: Mapping[str, str] | None = None,
    allow_shared_device: bool = False,
    init_method: str = "env://",
    rank: int = -1,
    timeout: float = 600.0,
) -> Mesh:
    """A communicator for every axis of `sizes`. All ranks call it alike.

    A process group that is there is used, else one is started: by torchrun's environment, or by `init_method` and
    `rank`. `device` is this rank's (None: the current GPU, or the CPU). `backends` names what runs an axis' collectives:
    auto (also where it is left out), nccl, host or oneshot; see `collectives.choice`. Raises UsageError when the sizes'
    product is not the number of ranks or a backend does not suit their devices, and leaves nothing behind; MgtpError when
    a backend that was asked for by name cannot be used.
    """
    world, asked = math.prod(sizes.values()), dict.fromkeys(sizes, "auto") | dict(backends or {})
    _check_sizes(sizes, asked, _ranks_there(world, init_method))
    if world == 1:
        return Mesh(dict.fromkeys(sizes, SingleRank()))
    limit, made_world = datetime.timedelta(seconds=timeout), not dist.is_initialized()
    if made_world:
        _start_world(init_method, rank, world, limit)
    device = device or _current_device()
    places = _places(device, world)
    try:
        _check_backends(sizes, asked, places)
    except UsageError:  # on every rank
        if made_world:
            dist.destroy_process_group()
        raise
    made: dict[tuple[tuple[int, ...], str], AxisGroup] = {}
    axes: dict[str, Communicator] = {axis: SingleRank() for axis in sizes}
    reasons: dict[str, str] = {}
    for axis, groups in axis_groups(sizes).items():
        for ranks in (ranks for ranks in groups if len(ranks) > 1):
            key = ranks, asked[axis]
            if key not in made:  # groups of the same ranks share
                members = [Rank(r, *places[r]) for r in ranks]
                made[key] = AxisGroup(members, device, asked[axis], allow_shared_device, limit)
            if dist.get_rank() in ranks:
                axes[axis], reasons[axis] = made[key].communicator
    return Mesh(axes, reasons, tuple(g for group in made.values() for g in group.made), made_world)


def _ranks_there(world: int, init_method: str) -> int:
    """How many ranks take part: those of the process group that is there, or that torchrun started."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", world)) if init_method == "env://" else world


def _check_sizes(sizes: Mapping[str, int], asked: Mapping[str, str], num_ranks: int) -> None:
    """Raise UsageError when `sizes` do not make a mesh of the ranks that there are, or a backend or its axis is unknown."""
    shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if min(sizes.values(), default=1) < 1 or math.prod(sizes.values()) != num_ranks:
        raise UsageError(
            f"a mesh of {shape} has {counted(math.prod(sizes.values()), 'rank')}, {num_ranks} are there",
            "choose sizes of 1 or more with that product (see mesh_sizes)",
        )
    for axis, backend in asked.items():
        if axis not in sizes:
            raise UsageError(f"backend {backend!r} is for axis {axis!r}, the mesh is {shape}", "name one of its axes")
        if backend not in BACKENDS:
            raise UsageError(f"axis {axis}: backend {backend!r} is unknown", f"use one of {', '.join(BACKENDS)}")


def _start_world(init_method: str, rank: int, world: int, limit: datetime.timedelta) -> None:
    """Start the default process group."""
    if init_method != "env://":
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world, timeout=limit)
        return
    store, rank, world = next(rendezvous(init_method, rank, world, timeout=limit))
    # torchrun's store outlives a mesh: the addresses of an earlier one's ranks would be taken for those of this one.
    turn = store.add(f"mgtp/meshes of rank {rank}", 1)
    prefix = PrefixStore(f"mgtp/mesh {turn}", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world, timeout=limit)


def _current_device() -> torch.device:
    """The current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _places(device: torch.device, world: int) -> list[tuple[str, str]]:
    """(host, device) of every rank."""
    places: list[tuple[str, str]] = [("", "")] * world
    dist.all_gather_object(places, (node_name(), str(device)))
    return places


def _check_backends(sizes: Mapping[str, int], asked: Mapping[str, str], places: list[tuple[str, str]]) -> None:
    """Raise UsageError when a backend that is asked for by name cannot run where an axis' ranks are."""
    for axis, groups in axis_groups(sizes).items():
        for ranks in (ranks for ranks in groups if len(ranks) > 1):
            _check_backend(axis, asked[axis], [places[r] for r in ranks])


def _check_backend(axis: str, asked: str, places: list[tuple[str, str]]) -> None:
    on_gpus = all(device.startswith("cuda") for _, device in places)
    if (asked == "nccl" and len(set(places)) < len(places)) or (asked in ("nccl", "oneshot") and not on_gpus):
        raise UsageError(
            f"axis {axis}: {asked} needs a GPU for every rank, they have {', '.join(device for _, device in places)}",
            "use the host backend",
        )
