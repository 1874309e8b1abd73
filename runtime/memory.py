"""What a rank really holds, as the system reports it; never the plan's numbers repeated.

On the CPU: resident bytes of the rank file's mapping, plus private growth. On CUDA: growth of the device's used
memory as the driver sees it, less what the context itself took. A driver does not say whose memory it is: ranks that
share a device go by what torch's allocator has of it for each.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from .messages import RankMemory

_PROC = Path("/proc")


@dataclass(frozen=True)
class Snapshot:
    """Bytes in use at one moment: private memory of the process (CPU, shared device), or of the whole device (CUDA)."""

    used: int
    free: int
    total: int


def take_snapshot(device: torch.device, shared: bool = False) -> Snapshot:
    """Memory in use now; `shared`: ranks share the device, and `used` is this one's part."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Snapshot(torch.cuda.memory_reserved(device) if shared else total - free, free, total)
    if not _PROC.exists():  # macOS: enough to size a cache by; probe-memory is refused there
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Snapshot(0, total // 2, total)
    memory = _fields(_PROC / "meminfo")
    private = _fields(_PROC / "self/status")["RssAnon"]
    return Snapshot(private, memory["MemAvailable"], memory["MemTotal"])


def report(rank: int, weight_bytes: int, device: torch.device) -> RankMemory:
    """What a rank that holds `weight_bytes` of weights takes now."""
    now = take_snapshot(device)
    private = _fields(_PROC / "self/status")["RssAnon"] if _PROC.exists() else 0
    return RankMemory(rank, weight_bytes, private, now.total - now.free, now.total)


def resident_bytes(file: Path) -> int:
    """Bytes of this process's mappings of `file` that are in memory (a private copy of a page counts once)."""
    if not _PROC.exists():
        return 0
    total, inside = 0, False
    target = str(file.resolve())
    for line in (_PROC / "self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(target)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def touch(block: torch.Tensor) -> None:
    """Read one byte of every page, so that a mapping is resident."""
    block[::4096].sum()


def _fields(path: Path) -> dict[str, int]:
    """'Name:  123 kB' lines as bytes."""
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
