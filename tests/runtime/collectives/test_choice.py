"""Choosing a backend: all ranks come to the same one, whatever goes wrong on one of them."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec

import pytest
import torch

from mgtp.runtime.collectives import self_test
from mgtp.runtime.collectives.agreement import Late, exchange, within
from mgtp.runtime.collectives.choice import choose
from mgtp.runtime.communicator import Communicator, HostCommunicator
from mgtp.shardplan.errors import MgtpError

CPU = torch.device("cpu")
SECONDS = 20.0


class Faulty(HostCommunicator):
    """The host's collectives with a fault on one rank."""

    def __init__(self, group, fault: str, where: int) -> None:
        super().__init__(group)
        self.fault = fault if self.rank == where else ""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.fault == "slow":
            time.sleep(0.02)
        total = super().all_reduce(tensor)
        if self.fault == "wrong sum":
            total[0] += 100
        return total

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = super().all_gather(tensor)
        return gathered.flip(0) if self.fault == "wrong all-gather" else gathered

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        sent = super().broadcast(tensor.clone(), source)
        return tensor if self.fault == "wrong broadcast" else sent


def outcome(host: Communicator, asked: str, faults: dict[str, str], where: int, seconds: float) -> tuple[str, str]:
    """(backend, reason) on this rank; ('stopped', message and hint) where it raises."""

    def factory(name: str):
        def make() -> Communicator:
            if faults[name] == "set-up" and host.rank == where:
                raise RuntimeError("no memory\nand more")
            made = Faulty(host.group, faults[name], where)  # type: ignore[attr-defined]
            made.backend = name
            return made

        return make

    try:
        factories = {name: factory(name) for name in faults}
        chosen, reason = choose(asked, factories, host, CPU, seconds)
    except MgtpError as error:
        return "stopped", f"{error.message} | {error.hint}"
    return chosen.backend, reason


def agreed(world, size: int, asked: str, faults: dict[str, str], where: int = 1, seconds: float = SECONDS):
    """What all ranks chose, which must be the same."""
    results = world.run_group(size, outcome, asked, faults, where, seconds)
    assert len(set(results)) == 1, results
    return results[0]


@pytest.mark.parametrize("size", [2, 3])
def test_a_backend_that_passes_is_taken(world, size):
    assert agreed(world, size, "auto", {"nccl": ""}) == ("nccl", "passed its self-test")
    assert agreed(world, size, "nccl", {"nccl": "", "oneshot": ""}) == ("nccl", "asked for")
    assert agreed(world, size, "host", {"nccl": ""}) == ("host", "asked for")
    assert agreed(world, size, "auto", {}) == ("host", "the ranks are on the CPU, or share a device")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("set-up", "rank 1: no memory ("),
        ("wrong sum", "rank 1: wrong sum of (1, 4096) bfloat16"),
        ("wrong all-gather", "rank 1: wrong all-gather of"),
        ("wrong broadcast", "rank 1: wrong broadcast of"),
    ],
)
def test_one_that_fails_on_one_rank_is_left_on_all(world, fault, words):
    backend, reason = agreed(world, 3, "auto", {"nccl": fault})
    assert backend == "host" and words in reason and "NCCL_P2P_DISABLE=1" in reason


def test_one_that_was_asked_for_by_name_stops_the_run(world):
    backend, message = agreed(world, 2, "oneshot", {"nccl": "", "oneshot": "wrong sum"})
    assert backend == "stopped" and "oneshot collectives cannot be used: rank 1: wrong sum" in message
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" in message


def test_the_faster_one_is_taken_and_the_other_fault_is_told(world):
    backend, reason = agreed(world, 2, "auto", {"nccl": "slow", "oneshot": ""})
    assert backend == "oneshot" and reason.startswith("fastest")
    backend, reason = agreed(world, 2, "auto", {"nccl": "", "oneshot": "set-up"})
    assert backend == "nccl" and "oneshot failed: rank 1: no memory" in reason


def test_auto_takes_oneshot_where_it_is_proven_only(world):
    assert agreed(world, 3, "auto", {"nccl": "slow", "oneshot": ""}) == ("nccl", "passed its self-test")
    assert agreed(world, 2, "auto", {"oneshot": ""}) == ("host", "no other backend fits")  # they share a device


class Silent:
    """A candidate that never answers, on any group."""

    rank, size, backend, capturable = 0, 2, "nccl", False

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        threading.Event().wait()
        return tensor


def silent_outcome(host: Communicator) -> tuple[str, str]:
    chosen, reason = choose("auto", {"nccl": Silent}, host, CPU, 0.5)  # type: ignore[dict-item]
    return chosen.backend, reason


def test_one_that_hangs_is_left_when_its_time_is_over(world):
    begin = time.monotonic()
    for backend, reason in world.run_group(2, silent_outcome):
        assert backend == "host" and "rank 0: no answer within 0.5 s; rank 1: no answer within 0.5 s" in reason
    assert time.monotonic() - begin < 60


def test_within_hands_on_results_and_errors():
    assert within(5, lambda: 3, CPU) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, CPU)
    with pytest.raises(Late):
        within(0.05, lambda: time.sleep(1), CPU)


def say(host: Communicator) -> list[str]:
    return exchange(host, "é" * 2000 if host.rank else "")


def test_exchange_cuts_long_texts(world):
    for texts in world.run_group(2, say):
        assert texts[0] == "" and texts[1] == "é" * 512


class Fusing(HostCommunicator):
    """One that could leave sums to norms."""

    fuses: bool | None = None

    def trust(self, fuses: bool) -> None:
        self.fuses = fuses


def fusing(host: Communicator, seconds: list[tuple[float | None, float]]) -> bool | None:
    """What this rank decides when it measures `seconds[rank]` together and apart."""
    measured, original = iter(seconds[host.rank]), self_test.seconds_per_call

    def measure(*_) -> float:
        found = next(measured)
        if found is None:
            raise RuntimeError("the clock has stopped")
        return found

    self_test.seconds_per_call = measure
    try:
        chosen, _ = choose("oneshot", {"oneshot": lambda: Fusing(host.group)}, host, CPU, SECONDS)  # type: ignore[attr-defined]
    finally:
        self_test.seconds_per_call = original
    assert isinstance(chosen, Fusing)
    return chosen.fuses


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels are not installed")
@pytest.mark.parametrize(
    ("seconds", "pays"),
    [([(1.0, 2.0), (1.5, 2.0)], True), ([(1.0, 2.0), (2.5, 1.0)], False), ([(1.0, 2.0), (None, 1.0)], False)],
    ids=["faster", "slower on one rank", "not measured on one rank"],
)
def test_ranks_agree_whether_norms_sum(world, seconds, pays):
    assert world.run_group(2, fusing, seconds) == [pays, pays]
