"""Latency and bandwidth of every backend, message size by message size, each sum checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..communicator import Communicator
from ..messages import CollectiveFigure
from .agreement import exchange
from .timing import seconds_per_call

SIZES = tuple(1 << power for power in range(10, 27))
"""1 KiB to 64 MiB"""


def measure(
    communicators: Mapping[str, Communicator], control: Communicator, device: torch.device
) -> list[CollectiveFigure]:
    """An all-reduce of every size over every backend; the slowest rank's time."""
    figures = []
    for backend, communicator in communicators.items():
        for size in SIZES:
            seconds, verified = _one(communicator, size, device)
            said = [text.split() for text in exchange(control, f"{seconds!r} {int(verified)}")]
            slowest = max(float(s) for s, _ in said)
            right = all(v == "1" for _, v in said)
            figures.append(CollectiveFigure(backend, size, communicator.size, slowest, size / slowest, right))
    return figures


def _one(communicator: Communicator, size: int, device: torch.device) -> tuple[float, bool]:
    """(seconds, whether the sum was right) of an all-reduce of `size` bytes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Small whole numbers, whose sums every dtype holds exactly.
    index = torch.arange(size // dtype.itemsize, device=device).unsqueeze(0) % 7
    x = (index + communicator.rank).to(dtype)
    ranks = communicator.size
    expected = (index * ranks + ranks * (ranks - 1) // 2).to(dtype)
    verified = torch.equal(communicator.all_reduce(x.clone()), expected)
    zeros = torch.zeros_like(x)
    calls = 10 if size <= 1 << 20 else 2
    return seconds_per_call(lambda: communicator.all_reduce(zeros), communicator, device, calls), verified
