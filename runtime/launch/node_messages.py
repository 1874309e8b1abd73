"""What nodes say to each other: the node that the user's requests come to (node 0), and the others."""

from __future__ import annotations

import msgspec

from ..messages import RankMessage
from ..options import RankOptions

ALIVE_SECONDS = 1.0
"""How often nodes say that they live."""

SILENCE_SECONDS = 10.0
"""After how long without a word a node is given up: its machine or the network between is gone."""

JOIN_SECONDS = 600.0
"""How much later than the first node the last one may start."""


class Join(msgspec.Struct, tag=True):
    """Node -> node 0: here I am, with files of this set."""

    node: int
    version: str
    fingerprint: str
    device: str


class Alive(msgspec.Struct, tag=True):
    """Either way, every ALIVE_SECONDS."""


class FromRank(msgspec.Struct, tag=True):
    """Node -> node 0: what one of its ranks says."""

    message: RankMessage


class Leave(msgspec.Struct, tag=True):
    """Node -> node 0: this node ends before the run is over; `cause` says why."""

    cause: str


class Begin(msgspec.Struct, tag=True):
    """Node 0 -> node: start the ranks. Paths and devices are the node's own, everything else is node 0's."""

    options: RankOptions


class End(msgspec.Struct, tag=True):
    """Node 0 -> node: the run is over; `cause` says why when it failed."""

    cause: str = ""


NodeMessage = Join | Alive | FromRank | Leave
FrontNodeMessage = Alive | Begin | End


def node_identity(node: int) -> bytes:
    """How a node's socket is called. (A first byte of zero is ZeroMQ's own.)"""
    return b"n" + node.to_bytes(4, "big")
