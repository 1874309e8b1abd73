"""Ranks for tests on GPUs, started once: importing torch is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.world
from tests.world import World

JOB_SECONDS = 60


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, World]]:
    """Ranks by their number. After a job that fails, the next one gets new processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.world, "JOB_SECONDS", JOB_SECONDS)
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        made = {size: World(size, spawn=True) for size in (2, 4)}
        yield made
        for world in made.values():
            world.close()
