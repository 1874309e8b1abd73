"""The start-up self-test of a backend: random data through it and through the host, and how long a small sum takes."""

from __future__ import annotations

from typing import Protocol, cast

import torch

from ..communicator import Communicator
from ..layers.norm import Summing
from ..parallel.linear import SendsProducts
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

SENT_TOKENS = (1, 16)
"""Of products that send themselves: by either kernel."""


def self_test(candidate: Communicator, host: Communicator, device: torch.device, seconds: float = SECONDS) -> str:
    """Why `candidate` must not be used, in the same words on every rank; empty when it may be.

    A candidate that hangs is left behind in a thread of its own.
    """
    expected = [_expected(host, _random(host.rank, dtype, shape)) for dtype, shape in CASES]
    products = [_expected(host, _product(*_factors(host.rank, tokens))) for tokens in SENT_TOKENS]

    def first_fault() -> str:
        faults = _faults(candidate, device, expected)
        if hasattr(candidate, "send_product"):
            faults += _faults_of_sent(cast(Sending, candidate), device, products)
        return faults[0] if faults else ""

    try:
        fault = within(seconds, first_fault, device)
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


class Sending(Fusing, SendsProducts, Protocol):
    """One that products can send to."""


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


def _factors(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank multiplies."""
    return _random(rank, torch.bfloat16, (tokens, 256)), _random(rank + 99, torch.bfloat16, (512, 256))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.float() @ weight.float().T


def _expected(host: Communicator, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks in float32, and the sum of magnitudes, which bounds rounding."""
    x = x.float()
    return host.all_reduce(x.clone()), host.all_reduce(x.abs())


def _faults(candidate: Communicator, device: torch.device, expected: list) -> list[str]:
    """What `candidate` does wrong on this rank. Goes on after a fault: the others would wait."""
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
        if not _close(found, total, magnitude * size, dtype):
            faults.append(f"wrong sum of {name}")
    return faults


def _faults_of_sent(candidate: Sending, device: torch.device, expected: list) -> list[str]:
    """The same of sums that products send."""
    faults = []
    for tokens, (total, magnitude) in zip(SENT_TOKENS, expected, strict=True):
        x, weight = (each.to(device) for each in _factors(candidate.rank, tokens))
        nothing = torch.zeros(total.shape, dtype=x.dtype, device=device)
        part = x.new_empty((tokens, 0)) if candidate.send_product(x, weight) else x @ weight.T
        found = candidate.all_reduce_add_rms_norm(part, nothing, None, 1e-6, False, True)[1].cpu().float()
        if not _close(found, total, magnitude * candidate.size, x.dtype):
            faults.append(f"wrong sum of products of {tokens} tokens")
    return faults


def _close(found: torch.Tensor, total: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype) -> bool:
    """Up to rounding: a backend may round after every addition."""
    return bool(((found - total).abs() <= magnitude * torch.finfo(dtype).eps).all())
