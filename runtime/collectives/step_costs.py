"""What collectives take of a decode step: those of one step, noted as they happen, then each timed on its own.

A sum whose parts products send is timed as if it were sent by a kernel of its own, which takes longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..communicator import Communicator
from ..messages import CollectiveCost
from .timing import seconds_per_call

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "all_reduce_add_rms_norm")


@dataclass(frozen=True)
class Call:
    """A collective of a step, by what decides how long it takes."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def noted(communicator: Communicator) -> Iterator[Counter[Call]]:
    """The collectives of this communicator that are called within the block, and how often each.

    One that is made of others is noted, they are not: their time is part of its time.
    """
    calls: Counter[Call] = Counter()
    busy = False

    def noting(name: str, method: Callable) -> Callable:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            nonlocal busy
            if busy:
                return method(tensor, *args)
            sums_for_norm = name == "all_reduce_add_rms_norm"
            shape = args[0].shape if sums_for_norm else tensor.shape  # nothing is left of what was sent: the residual's
            calls[Call(name, tuple(shape), tensor.dtype)] += 1
            busy = True
            try:
                return method(tensor, *args)
            finally:
                busy = False

        return call

    names = [name for name in OPERATIONS if hasattr(communicator, name)]
    for name in names:
        setattr(communicator, name, noting(name, getattr(communicator, name)))
    try:
        yield calls
    finally:
        for name in names:
            delattr(communicator, name)  # the class' own shows again


def costs(calls: Counter[Call], communicator: Communicator, device: torch.device) -> list[CollectiveCost]:
    """Seconds of each kind of call on this rank. All ranks do this together, having noted the same calls."""
    return [
        CollectiveCost(
            call.operation,
            list(call.shape),
            str(call.dtype).removeprefix("torch."),
            count,
            seconds_per_call(_again(call, communicator, device), communicator, device),
        )
        for call, count in calls.items()
    ]


def _again(call: Call, communicator: Communicator, device: torch.device) -> Callable[[], object]:
    """The same call on zeros."""
    x = torch.zeros(call.shape, dtype=call.dtype, device=device)
    method = getattr(communicator, call.operation)
    if call.operation != "all_reduce_add_rms_norm":
        return lambda: method(x)
    weight = torch.ones(call.shape[-1], dtype=call.dtype, device=device)
    return lambda: method(x, x, weight, 1e-5, False, True)
