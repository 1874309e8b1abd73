"""Four random kills of a server under load; `make soak` has two hundred."""

from __future__ import annotations

from tests.server_kills import kill_again_and_again


def test_four_kills(served_checkpoint, sharded):
    kill_again_and_again(4, seed=10, shard_set=sharded(served_checkpoint, 2))
