"""How much of the host's memory is free."""

from __future__ import annotations

import os
from pathlib import Path


def host_free_bytes() -> int:
    """What processes can still take of the host's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # macOS: the half of it
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
