"""What the oneshot backend does with a tensor before a kernel sees it. Guards against ranks that take different ways,
and against steps of which no token is wanted: the last layer of a piece of a long prompt sums nothing.
"""

from __future__ import annotations

import sys

import pytest
import torch

from mgtp.runtime.collectives.oneshot import OneShotCommunicator
from mgtp.runtime.communicator import SingleRank


class Memory:
    """Of a group whose kernels are stand-ins."""

    two_shot, kernels = True, None


class Pair(SingleRank):
    """A fallback of two ranks that must not be asked."""

    size = 2


def test_an_address_does_not_decide_which_way_a_tensor_goes(monkeypatch):
    seen: list[torch.Tensor] = []

    def stand_in(x: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(x)
        return x

    kernels = type("Kernels", (), {"all_reduce": staticmethod(stand_in), "all_gather": staticmethod(stand_in)})
    monkeypatch.setitem(sys.modules, "mgtp.runtime.kernels.all_reduce", kernels)  # triton is there on a GPU alone
    communicator = OneShotCommunicator(Memory(), Pair())  # type: ignore[arg-type]
    x = torch.arange(9.0)[1:].view(2, 4)
    assert x.data_ptr() % 16
    assert torch.equal(communicator.all_reduce(x), x)
    assert torch.equal(communicator.all_gather(x.t()), x.t())
    assert [t.data_ptr() % 16 for t in seen] == [0, 0]


@pytest.mark.parametrize("fuses", [True, False])
def test_sums_of_no_tokens_are_not_sent_nor_left_to_the_kernel(fuses, monkeypatch):
    def add(x: torch.Tensor, residual: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x + residual

    monkeypatch.setitem(sys.modules, "mgtp.runtime.kernels.all_reduce", type("Kernels", (), {"PATIENCE": 1}))
    monkeypatch.setitem(sys.modules, "mgtp.runtime.kernels.norm", type("Kernels", (), {"add_rms_norm": add}))
    communicator = OneShotCommunicator(Memory(), Pair())  # type: ignore[arg-type]
    communicator.trust(fuses)
    x = torch.ones(0, 8)
    assert not communicator.send_product(torch.ones(0, 4), torch.ones(8, 4))
    assert communicator.all_reduce_add_rms_norm(x, x, None, 1e-5, False, True)[1].shape == (0, 8)
