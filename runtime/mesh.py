"""Joining the ranks: binding a device, the process group, and the communicator of the tp axis."""

from __future__ import annotations

import datetime
import os
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


def join(options: RankOptions, rank: int, device: torch.device, folder: Path) -> Communicator:
    """Meet the other ranks through a file in the run's folder; NCCL between GPUs, gloo otherwise.

    NCCL refuses two ranks on one device: those exchange through the host.
    """
    if options.tp_size == 1:
        return SingleRank()
    shared = device.type == "cuda" and len(set(options.devices)) < len(options.devices)
    backend = "nccl" if device.type == "cuda" and not shared else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.tp_size,
        timeout=datetime.timedelta(seconds=options.start_timeout),
        device_id=device if backend == "nccl" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return HostCommunicator(group) if shared else GroupCommunicator(group)


def leave() -> None:
    """Leave the process group together, after success; after a failure a rank just exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
