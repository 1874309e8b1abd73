"""What the oneshot backend does with a tensor before a kernel sees it. Guards against ranks that take different ways."""

from __future__ import annotations

import sys

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
