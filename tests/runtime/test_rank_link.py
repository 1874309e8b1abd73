"""What a rank says when it fails: who is to blame, and from which moment on it can say anything."""

from __future__ import annotations

import socket

import pytest
import zmq

from mgtp.runtime.options import RankOptions
from mgtp.runtime.rank_link import SECRET_VARIABLE, RankLink, is_collective


@pytest.mark.parametrize(
    ("text", "of_others"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711", True),
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.28", True),
        ("NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        ("CUDA error: device-side assert triggered", False),
        ("wrong on purpose", False),
    ],
)
def test_only_what_another_rank_can_have_caused_is_blamed_on_others(text, of_others):
    assert is_collective(RuntimeError(text)) is of_others


def test_a_socket_that_cannot_be_had_can_be_reported(tmp_path, monkeypatch):
    """The way to the front is there before anything that may fail is tried."""
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of more than 16 characters")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        steps = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        link = RankLink(0, RankOptions("nowhere", 2, "cpu", [], steps=steps), tmp_path)
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            link.open()
        link.close()
