"""Every collective of the host backend, at every world size, against a float64 sum worked out in one process."""

from __future__ import annotations

import pytest
import torch

from mgtp.runtime.communicator import Communicator, SingleRank
from mgtp.runtime.mesh import axis_groups

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
SHAPES = ((1,), (7,), (1, 1), (3, 5), (2, 3, 129))
WORLD_SIZES = pytest.mark.parametrize("size", range(1, 9))


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of one rank, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers contiguous, transposed in memory, and as every other element."""
    spread = x.new_zeros((*x.shape, 2))
    spread[..., 0] = x
    return [x.clone(), x.clone().T.contiguous().T if x.dim() == 2 else x.clone(), spread[..., 0]]


def all_operations(communicator: Communicator) -> None:
    """Checked on every rank: sums, gathered and shifted tensors and broadcasts of every dtype, shape and layout."""
    rank, size = communicator.rank, communicator.size
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [values(r, shape, dtype) for r in range(size)]
            exact = torch.stack([p.double() for p in parts]).sum(0)
            for x in layouts(parts[rank]):
                gathered = communicator.all_gather(x)
                assert torch.equal(gathered, torch.stack(parts)), (dtype, shape)
                assert torch.equal(communicator.shift(x), parts[rank - 1]), (dtype, shape)
                total = communicator.all_reduce(x)
                assert total.dtype == dtype and total.shape == x.shape
                check_sum(total, exact, parts)
            for x in layouts(parts[rank]):
                source = size - 1
                out = communicator.broadcast(x, source)
                assert torch.equal(out, parts[source]) and torch.equal(x, parts[source])


def check_sum(total: torch.Tensor, exact: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """16-bit sums are the float32 sum rounded once; float32 is within its own rounding; integers are exact."""
    magnitude = torch.stack([p.double().abs() for p in parts]).sum(0)
    if not total.is_floating_point():
        allowed = torch.zeros_like(exact)
    elif total.element_size() == 2:
        allowed = exact.abs() * torch.finfo(total.dtype).eps / 2 + magnitude * 1e-5
    else:
        allowed = magnitude * torch.finfo(total.dtype).eps * len(parts)
    assert ((total.double() - exact).abs() <= allowed).all()


@WORLD_SIZES
def test_every_operation_against_a_float64_sum(world, size):
    world.run_group(size, all_operations)


def test_a_single_rank_exchanges_nothing():
    x = torch.randn(3)
    one = SingleRank()
    assert one.all_reduce(x) is x and one.broadcast(x) is x and one.shift(x) is x and one.all_gather(x).shape == (1, 3)


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"tp": 1}, {"tp": [(0,)]}),
        ({"tp": 3}, {"tp": [(0, 1, 2)]}),
        ({"tp": 2, "cp": 2}, {"tp": [(0, 1), (2, 3)], "cp": [(0, 2), (1, 3)]}),
        ({"tp": 4, "cp": 1}, {"tp": [(0, 1, 2, 3)], "cp": [(0,), (1,), (2,), (3,)]}),
        ({"tp": 1, "cp": 2}, {"tp": [(0,), (1,)], "cp": [(0, 1)]}),
    ],
)
def test_groups_along_every_axis(sizes, groups):
    assert axis_groups(sizes) == groups
