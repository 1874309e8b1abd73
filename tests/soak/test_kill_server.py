"""Two hundred random kills of a server under load (tests/server_kills.py)."""

from __future__ import annotations

import pytest

from tests.server_kills import kill_again_and_again


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_two_hundred_kills(tiny_checkpoint, sharded):
    kill_again_and_again(200, seed=200, shard_set=sharded(tiny_checkpoint("base"), 2))
