"""What ranks check before they load."""

from __future__ import annotations

import pytest
import torch

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.self_test import check_collectives, unequal_memory
from mgtp.shardplan.errors import RankError

GIB = 1 << 30


class LosesWrites(SingleRank):
    """Two ranks, of which the other's half of the sum is lost now and then."""

    size, backend = 2, "nccl"

    def all_reduce(self, tensor):
        total = 2 * tensor + 1
        total[::100] = tensor[::100]
        return total


def test_sums_that_are_wrong_are_seen():
    with pytest.raises(RankError, match=r"all-reduce over 2 ranks \(nccl\): 41 of 4096 numbers are wrong") as error:
        check_collectives(LosesWrites(), torch.device("cpu"))
    assert "NCCL_P2P_DISABLE=1" in error.value.hint


@pytest.mark.parametrize("size", [1, 2])
def test_real_collectives_pass(world, size):
    world.run_group(size, check_collectives, torch.device("cpu"))


def test_ranks_with_less_memory_are_named():
    assert unequal_memory([80 * GIB, 79 * GIB, 80 * GIB]) is None
    text = unequal_memory([80 * GIB, 20 * GIB, 80 * GIB])
    assert text is not None and "(80.0 GiB): rank 1 20.0 GiB" in text
