"""What this device can do at best: the physical limits that measurements are held against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
CALLS, REPEATS = 4, 4


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read plus bytes written a second by a copy within the device's memory, several times its caches' size."""
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square matrix product of random numbers."""
    n = MATRIX_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of several runs in a row, after a first one: the best of some rounds, since this is a limit."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run()
    wait()
    rounds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        wait()
        rounds.append((time.perf_counter() - begin) / CALLS)
    return min(rounds)
