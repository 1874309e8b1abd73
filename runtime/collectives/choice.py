"""Which backend runs an axis' collectives: what was asked for, or the fastest that passes its self-test, else the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch

from ...shardplan.errors import MgtpError
from ..communicator import Communicator
from .agreement import complaints, within
from .self_test import SECONDS, Fusing, fusing_pays, self_test, small_sum_seconds

Factory = Callable[[], Communicator]

PROVEN_RANKS = 2
"""Groups of up to so many ranks, each with a GPU of its own, have been seen right and fast over oneshot (decision 9)."""

VARIABLES = {
    "nccl": "try NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 or NCCL_DEBUG=INFO, or --collective host",
    "oneshot": "try TORCH_SYMM_MEM_DISABLE_MULTICAST=1 or --collective nccl",
}


def choose(
    asked: str,
    factories: Mapping[str, Factory],
    host: Communicator,
    device: torch.device,
    seconds: float = SECONDS,
) -> tuple[Communicator, str]:
    """The communicator of an axis and why it is that one, the same on every rank.

    `factories` are the backends that the placement allows, besides the host. One that was asked for by name and fails
    stops the run with MgtpError; auto takes the fastest of those that are proven and pass, at last the host.
    """
    if asked == "host" or not factories:
        return host, "asked for" if asked == "host" else "the ranks are on the CPU, or share a device"
    proven = ("nccl", "oneshot") if "nccl" in factories and host.size <= PROVEN_RANKS else ("nccl",)
    names = [asked] if asked != "auto" else [name for name in proven if name in factories]
    passed: list[tuple[float, str, Communicator]] = []
    faults: list[str] = []
    for name in names:
        candidate, fault = attempt(factories[name], host, device, seconds)
        if candidate is not None and not fault:
            timed = small_sum_seconds(candidate, host, device) if len(names) > 1 else 0.0
            passed.append((timed, name, candidate))
        elif asked == name:
            raise MgtpError(f"{name} collectives cannot be used: {fault}", VARIABLES[name])
        else:
            faults.append(f"{name} failed: {fault} ({VARIABLES[name]})")
    if not passed:
        return host, "; ".join(faults) or "no other backend fits"
    timed, name, communicator = min(passed, key=lambda entry: entry[0])
    reason = f"fastest, {timed * 1e6:.1f} us for 16 KiB" if len(passed) > 1 else "passed its self-test"
    return communicator, "; ".join(["asked for" if asked == name else reason, *faults])


def attempt(
    factory: Factory, host: Communicator, device: torch.device, seconds: float = SECONDS
) -> tuple[Communicator | None, str]:
    """A backend that all ranks could set up and that works, or what is wrong with it on which ranks."""
    candidate, fault = None, ""
    try:
        candidate = within(seconds, factory, device)
    except Exception as error:
        fault = str(error).partition("\n")[0] or type(error).__name__
    fault = complaints(host, fault)
    if fault or candidate is None:
        return None, fault
    fault = self_test(candidate, host, device, seconds)
    if fault and (abort := getattr(candidate, "abort", None)):
        abort()  # a kernel that waits for ever would keep the device busy
    if not fault and (trust := getattr(candidate, "trust", None)):
        trust(fusing_pays(cast(Fusing, candidate), host, device))
    return candidate, fault
