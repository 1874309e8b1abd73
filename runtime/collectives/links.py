"""How this rank's GPU reaches the others: asked of the driver, and tried by writing to them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..messages import LinkInfo
from ..nvml import Nvml

COPY_BYTES = 256 << 20


def find_links(device: torch.device, others: Sequence[int]) -> list[LinkInfo]:
    """A link from `device` to every other GPU of `others`."""
    nvml, found = Nvml(), []
    for other in sorted(set(others) - {device.index}):
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in (device.index, other)]
        peers = torch.cuda.can_device_access_peer(device.index, other)
        linked = nvml.are_linked(*uuids)
        kind = "NVLink" if linked else "PCIe" if linked is False else "unknown"
        written, bandwidth = _write(device, torch.device("cuda", other))
        num_links = nvml.num_nvlinks(uuids[0]) if linked else None
        found.append(LinkInfo(device.index, other, kind, num_links, peers, written, bandwidth))
    return found


def _write(device: torch.device, other: torch.device) -> tuple[bool, float]:
    """Whether random bytes written to `other` are there afterwards, and bytes a second."""
    size = min(COPY_BYTES, *(torch.cuda.mem_get_info(d)[0] // 4 for d in (device, other)))
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, device=other)
    target.copy_(source)
    torch.cuda.synchronize(device)
    right = torch.equal(target.cpu(), source.cpu())
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    torch.cuda.synchronize(other)
    return right, size / (time.perf_counter() - begin)
