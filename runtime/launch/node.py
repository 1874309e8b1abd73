"""A node beside node 0: starts its ranks when told to, watches them, and passes on what they say."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import zmq

from ...shardplan.errors import MgtpError, RankError, UsageError
from ...shardplan.shard_set import ShardSet
from ...shardplan.version import __version__
from .. import secure_sockets
from ..messages import Failed, RankMessage, Stage
from ..options import RankOptions
from ..rank_link import SECRET_VARIABLE
from . import group as group_module
from .cluster import Cluster
from .devices import Placement
from .first_cause import OWN_WORDS_SECONDS, show_tail
from .group import RankGroup
from .node_messages import (
    ALIVE_SECONDS,
    JOIN_SECONDS,
    SILENCE_SECONDS,
    Alive,
    Begin,
    End,
    FromRank,
    FrontNodeMessage,
    Join,
    Leave,
    NodeMessage,
    node_identity,
)
from .patience import Patience
from .rank_process import RankProcess
from .start import LaunchOptions, place_local_ranks

log = logging.getLogger("mgtp.launch")

NUM_HANG_UPS = 30
"""What stands before node 0, or node 0 as it ends, may hang up a few times; so often, within seconds, it is another."""


class FrontLink:
    """The connection to node 0."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FrontNodeMessage)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, node_identity(cluster.node))
        self._strangers = secure_sockets.Strangers(self._socket, listens=False)
        secure_sockets.connect(self._socket, f"tcp://{cluster.host}:{cluster.port}", cluster.secret)
        self._silence, self._due = Patience(SILENCE_SECONDS), Patience(ALIVE_SECONDS)
        self._is_over = False

    def send(self, message: NodeMessage) -> None:
        """Tell node 0."""
        self._socket.send(self._encoder.encode(message))

    def join(self, message: Join) -> RankOptions:
        """Announce this node and wait to be told what to run.

        Raises RankError when node 0 refuses or is not there, UsageError when it has another secret.
        """
        self.send(message)
        patience = Patience(JOIN_SECONDS)
        where = f"{self.cluster.host}:{self.cluster.port}"
        while not patience.is_over:
            answer = self._receive(100)
            if isinstance(answer, Begin):
                self._silence.restart()
                return answer.options
            if isinstance(answer, End):
                self._is_over = True
                raise RankError(f"node 0 ended the run: {answer.cause or 'it is over'}", "see what node 0 says")
            if self._strangers.look() >= NUM_HANG_UPS:
                what = f"node 0 at {where} has another {SECRET_VARIABLE}, or is something else"
                raise UsageError(what, "give all nodes the same secret, and node 0's address")
        hint = "start it there, and give both the same secret"
        raise RankError(f"node 0 does not answer at {where} within {JOIN_SECONDS:g} s", hint)

    def leave(self, error: BaseException) -> None:
        """Tell node 0, unless it has ended the run, why this node ends."""
        if not self._is_over:
            self.send(Leave(error.message if isinstance(error, MgtpError) else "it was told to end"))

    def poll(self) -> End | None:
        """Say that this node lives; the end of the run when node 0 has told it. Raises RankError when node 0 is gone."""
        if self._due.is_over:
            self._due.restart()
            self.send(Alive())
        while (message := self._receive(0)) is not None:
            self._silence.restart()
            if isinstance(message, End):
                self._is_over = True
                return message
        if self._silence.is_over:
            raise RankError(
                f"node 0 has not been heard of for {SILENCE_SECONDS:g} s", "check that machine and the network between"
            )
        return None

    def _receive(self, milliseconds: int) -> FrontNodeMessage | None:
        return self._decoder.decode(self._socket.recv()) if self._socket.poll(milliseconds) else None

    def close(self) -> None:
        """Flush what was said, for a second at most."""
        self._context.destroy(linger=1000)


def run_node(shard_set: ShardSet, launch: LaunchOptions) -> None:
    """Run this node's ranks until node 0 ends the run. Raises RankError when it failed, whoever's fault it is."""
    cluster = launch.cluster
    assert cluster is not None
    placement = place_local_ranks(shard_set, launch)
    link = FrontLink(cluster)
    try:
        where = f"{cluster.host}:{cluster.port}"
        log.info("node %d of %d: waiting for node 0 at %s", cluster.node, cluster.num_nodes, where)
        options = link.join(Join(cluster.node, __version__, shard_set.plan.fingerprint, placement.device))
        _run_ranks(_own(options, shard_set, placement, launch), cluster, link)
    except BaseException as error:
        link.leave(error)
        raise
    finally:
        link.close()


def _own(options: RankOptions, shard_set: ShardSet, placement: Placement, launch: LaunchOptions) -> RankOptions:
    """Node 0's options with this node's folder and devices."""
    return msgspec.structs.replace(
        options,
        shard_set=str(shard_set.path.resolve()),
        devices=list(placement.indices),
        allow_shared_device=launch.allow_shared_device,
        log_level=launch.log_level,
    )


def _run_ranks(options: RankOptions, cluster: Cluster, link: FrontLink) -> None:
    with RankGroup(options, group_module.RANK_MODULE, cluster) as group:
        local = {e.rank: e for e in group.ranks}
        watch = _Watch(group)
        while (end := link.poll()) is None:
            message = group.poll()
            if isinstance(message, Stage):
                local[message.rank].stage = message.name
            for each in (*([message] if message is not None else []), *watch.failures(message)):
                link.send(FromRank(each))
        if end.cause:
            raise RankError(f"node 0 ended the run: {end.cause}", "see what node 0 says")
        group.end_by_themselves()


class _Watch:
    """Notices ranks that end without a word or are suspended, once each."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._told: set[int] = set()
        self._wait = Patience(OWN_WORDS_SECONDS)

    def failures(self, message: RankMessage | None) -> Sequence[Failed]:
        """What is to be reported in ranks' stead, given what they have just said themselves."""
        if isinstance(message, Failed):
            self._told.add(message.rank)
        found = [e for e in self._group.local if e.rank not in self._told and e.has_failed]
        if not found:
            self._wait.restart()
        if not found or not self._wait.is_over:
            return []
        self._told.update(e.rank for e in found)
        return [Failed(e.rank, e.last_stage, _how_it_failed(e), "see what its node says", 5, False) for e in found]


def _how_it_failed(entry: RankProcess) -> str:
    if not entry.has_exited:
        return "is stopped (SIGSTOP)"
    tail = show_tail(entry)
    return entry.how_it_ended + (f": {tail[-1]}" if tail else "")
