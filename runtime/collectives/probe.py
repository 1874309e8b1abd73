"""What `mgtp probe` asks of every rank: its device, its links, and every backend's latency and bandwidth."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from .. import memory, mesh, stages
from ..communicator import Communicator
from ..messages import AxisInfo, DeviceReport
from ..nvml import Nvml
from ..rank_link import RankLink
from .choice import attempt
from .groups import AxisGroup, Rank, node_name
from .links import find_links
from .measure import measure


def probe_device(link: RankLink) -> DeviceReport:
    """Everything, all ranks together. Every rank reports the links of its device, rank 0 also the collectives."""
    options = link.options
    link.stage(stages.DEVICE)
    device = mesh.bind_device(options, int(os.environ.get("LOCAL_RANK", link.rank)))
    on_gpu = device.type == "cuda"
    report = DeviceReport(
        rank=link.rank,
        device=f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else "cpu",
        total_bytes=memory.take_snapshot(device).total,
        torch_version=str(torch.__version__),
        nccl_version=_nccl_version(),
        driver_version=Nvml().driver_version(),
        links=find_links(device, options.devices) if on_gpu else [],
        collectives=[],
        axis=None,
        faults={},
    )
    if options.tp_size > 1:
        link.stage(stages.RENDEZVOUS)
        _measure_collectives(link, device, report)
    return report


def _measure_collectives(link: RankLink, device: torch.device, report: DeviceReport) -> None:
    """Set every backend up as a run would, test it, and measure those that pass."""
    options = link.options
    limit = datetime.timedelta(seconds=options.collective_timeout)
    rendezvous = f"file://{link.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=link.rank, world_size=options.tp_size, timeout=limit)
    names = [str(torch.device("cuda", i)) for i in options.devices] or ["cpu"] * options.tp_size
    members = [Rank(r, node_name(), name) for r, name in enumerate(names)]
    group = AxisGroup(members, device, options.collective, options.allow_shared_device, limit)
    control, host = group.host_communicators()
    communicators: dict[str, Communicator] = {"host": host}
    for name, factory in (group.factories(control, host) if group.on_gpus else {}).items():
        link.stage(f"{name} self-test")
        candidate, fault = attempt(factory, control, device)
        if candidate is None or fault:
            report.faults[name] = fault
        else:
            communicators[name] = candidate
    link.stage("collectives")
    report.collectives = measure(communicators, control, device)
    link.stage("choice")
    chosen, reason = group.communicator
    report.axis = AxisInfo("tp", chosen.size, chosen.backend, reason)


def _nccl_version() -> str | None:
    """Such as 2.28.9; None where torch is built without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))
