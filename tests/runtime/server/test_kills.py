"""Ten random kills of a server under load; `make soak` has two hundred."""

from __future__ import annotations

from tests.server_kills import kill_again_and_again


def test_ten_kills(served_checkpoint, sharded):
    kill_again_and_again(10, seed=10, shard_set=sharded(served_checkpoint, 2))
