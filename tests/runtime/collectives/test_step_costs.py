"""What is noted of a step's collectives, and how it is added up."""

from __future__ import annotations

import pytest
import torch

from mgtp.runtime.collectives.step_costs import Call, costs, noted
from mgtp.runtime.communicator import HostCommunicator, SingleRank
from mgtp.runtime.launch.collective_share import share
from mgtp.runtime.messages import CollectiveCost


def noted_and_timed(communicator: HostCommunicator) -> tuple[dict[Call, int], list[CollectiveCost], bool]:
    x = torch.ones(2, 8)
    with noted(communicator) as calls:
        for _ in range(3):
            communicator.all_reduce(x)
        communicator.all_gather(x)
    communicator.broadcast(x)
    restored = "all_reduce" not in vars(communicator)
    return dict(calls), costs(calls, communicator, torch.device("cpu")), restored


def test_calls_are_noted_within_the_block_and_timed(world):
    for calls, found, restored in world.run_group(2, noted_and_timed):
        assert calls == {
            Call("all_reduce", (2, 8), torch.float32): 3,
            Call("all_gather", (2, 8), torch.float32): 1,
        }
        assert [(c.operation, c.shape, c.count) for c in found] == [
            ("all_reduce", [2, 8], 3),
            ("all_gather", [2, 8], 1),
        ]
        assert all(c.seconds > 0 for c in found) and restored


def test_a_sum_that_a_product_has_sent_is_noted_as_large_as_it_is():
    class Norming:
        def all_reduce_add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return residual

    with noted(communicator := Norming()) as calls:  # type: ignore[arg-type]
        communicator.all_reduce_add_rms_norm(torch.empty(2, 0), torch.ones(2, 8))
    assert calls == {Call("all_reduce_add_rms_norm", (2, 8), torch.float32): 1}


def test_a_collective_that_is_made_of_others_is_noted_once():
    class Gathering(SingleRank):
        def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
            return self.all_gather(tensor)[source]

    with noted(communicator := Gathering()) as calls:
        communicator.broadcast(torch.ones(2))
        communicator.all_gather(torch.ones(3))
    assert calls == {Call("broadcast", (2,), torch.float32): 1, Call("all_gather", (3,), torch.float32): 1}


def test_the_slowest_rank_counts():
    def of_rank(seconds: float) -> list[CollectiveCost]:
        return [
            CollectiveCost("all_reduce", [1, 8], "bfloat16", 4, seconds),
            CollectiveCost("all_reduce", [1, 2], "float32", 2, 1e-5),
            CollectiveCost("broadcast", [1], "int64", 1, 2e-5),
        ]

    found = share("nccl", 1, 2.0, [of_rank(1e-4), of_rank(2e-4)])
    assert (found.launches, found.operations) == (7, {"all_reduce": 6, "broadcast": 1})
    assert found.ms == pytest.approx(4 * 0.2 + 2 * 0.01 + 0.02) and found.share == pytest.approx(found.ms / 2)
    assert share("nccl", 1, None, [of_rank(1e-4)]).share is None
