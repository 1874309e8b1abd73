"""The start-up self-test of a backend: random data through it and through the host, and how long a small sum takes."""

from __future__ import annotations

from typing import Protocol

import torch

from ..communicator import Communicator
from ..layers.norm import Summing
from .agreement import complaints, exchange, within
from .timing import seconds_per_call

SECONDS = 30.0
"""For all of a backend's set-up, and for all of its test. The first collective of NCCL takes a few seconds."""

TIMED_SHAPE = (1, 8192)
"""The sum that is timed: 16 KiB in bfloat16, a decode step of a few sequences."""

CASES = (
    (torch.bfloat16, (1, 4096)),
    (torch.float32, (3, 1000)),
    (torch.float16, (16, 4096)),
    (torch.bfloat16, (300, 4096)),
    (torch.float32, (77,)),
    (torch.float32, (260, 8192)),
)
"""One of every way that a message can take: one-shot, two-shot, too large, of one dimension, of odd size."""


def self_test(candidate: Communicator, host: Communicator, device: torch.device, seconds: float = SECONDS) -> str:
    """Why `candidate` must not be used, in the same words on every rank; empty when it may be.

    A candidate that hangs is left behind in a thread of its own.
    """
    expected = [_expected(host, dtype, shape) for dtype, shape in CASES]
    try:
        fault = within(seconds, lambda: _first_fault(candidate, device, expected), device)
    except Exception as error:
        fault = str(error).partition("\n")[0] or type(error).__name__
    return complaints(host, fault)


def small_sum_seconds(candidate: Communicator, host: Communicator, device: torch.device) -> float:
    """What the slowest rank takes for a small sum. A rank that cannot tell makes it infinite on all of them."""
    x = torch.ones(TIMED_SHAPE, dtype=torch.bfloat16, device=device)
    try:
        seconds = within(SECONDS, lambda: seconds_per_call(lambda: candidate.all_reduce(x), candidate, device), device)
    except Exception:
        seconds = float("inf")
    return max(float(text) for text in exchange(host, repr(seconds)))


class Fusing(Communicator, Summing, Protocol):
    """A communicator whose sums a norm can make itself."""


def fusing_pays(candidate: Fusing, host: Communicator, device: torch.device) -> bool:
    """Whether a sum, residual add and norm by one kernel take the slowest rank no longer than one after another do."""
    from ..kernels.norm import add_rms_norm

    x, residual = (torch.ones(TIMED_SHAPE, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = residual[0].clone()
    ways = (
        lambda: candidate.all_reduce_add_rms_norm(x, residual, weight, 1e-6, False, True),
        lambda: add_rms_norm(candidate.all_reduce(x), residual, weight, 1e-6, one_plus=False, cast_first=True),
    )
    try:
        mine = [within(SECONDS, lambda way=way: seconds_per_call(way, candidate, device), device) for way in ways]
    except Exception:
        mine = [float("inf"), 0.0]
    said = [tuple(map(float, text.split())) for text in exchange(host, f"{mine[0]!r} {mine[1]!r}")]
    together, apart = (max(column) for column in zip(*said, strict=True))
    return together <= apart


def _random(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A rank's part of a sum, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _expected(host: Communicator, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks in float32, and the sum of magnitudes, which bounds rounding."""
    x = _random(host.rank, dtype, shape).float()
    return host.all_reduce(x.clone()), host.all_reduce(x.abs())


def _first_fault(candidate: Communicator, device: torch.device, expected: list) -> str:
    """What `candidate` does wrong on this rank, or an empty string. Goes on after a fault: the others would wait."""
    size, faults = candidate.size, []
    for (dtype, shape), (total, magnitude) in zip(CASES, expected, strict=True):
        mine = _random(candidate.rank, dtype, shape).to(device)
        name = f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
        gathered = candidate.all_gather(mine.clone()).cpu()
        if not torch.equal(gathered, torch.stack([_random(r, dtype, shape) for r in range(size)])):
            faults.append(f"wrong all-gather of {name}")
        sent = candidate.broadcast(mine.clone(), size - 1).cpu()
        if not torch.equal(sent, _random(size - 1, dtype, shape)):
            faults.append(f"wrong broadcast of {name}")
        found = candidate.all_reduce(mine).cpu().float()
        # A backend may round after every addition.
        if not ((found - total).abs() <= magnitude * size * torch.finfo(dtype).eps).all():
            faults.append(f"wrong sum of {name}")
    return faults[0] if faults else ""
