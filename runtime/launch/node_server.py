"""Node 0's side of a cluster: takes the other nodes in, passes on what their ranks say, and notices when one is gone.

What comes from another node goes to the same socket as what local ranks say, so that nobody else needs to know of nodes.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from ...shardplan.errors import MgtpError
from ...shardplan.version import __version__
from ...shardplan.workers import start_threads
from .. import secure_sockets
from ..messages import Failed, Ready, Stage
from ..options import RankOptions
from ..rank_link import SECRET_VARIABLE
from ..stages import RUNNING, SPAWN
from .cluster import NUM_PORTS, Cluster
from .node_messages import (
    ALIVE_SECONDS,
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

log = logging.getLogger("mgtp.launch")

END_SECONDS = 2.0
"""How long the last message may take to go out."""


class NodeServer:
    """Runs in a thread of its own from the constructor to `stop`. Raises MgtpError when the port cannot be had."""

    def __init__(self, cluster: Cluster, options: RankOptions, folder: Path) -> None:
        self._cluster, self._options = cluster, options
        self._patience: dict[int, Patience] = {}
        self._gone: set[int] = set()
        self._stages: dict[int, str] = {}
        self._warned = False
        self._stopped, self._cause = threading.Event(), ""
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(NodeMessage)
        self._context = zmq.Context()
        self._nodes = self._context.socket(zmq.ROUTER)
        self._strangers = secure_sockets.Strangers(self._nodes, listens=True)
        self._front = self._context.socket(zmq.PUSH)
        try:
            _check_ports(cluster)
            secure_sockets.listen(self._nodes, f"tcp://{cluster.host}:{cluster.port}", cluster.secret)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise _no_port(cluster, cluster.port, error.errno or 0) from None
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._front.connect(f"ipc://{folder}/front")
        self._thread = threading.Thread(target=self._run, daemon=True)
        start_threads([self._thread])

    def stop(self, cause: str = "") -> None:
        """Tell every node that the run is over, and end."""
        self._cause = cause
        self._stopped.set()
        self._thread.join(END_SECONDS + 1)

    def _run(self) -> None:
        due = Patience(ALIVE_SECONDS)
        while not self._stopped.is_set():
            if self._nodes.poll(100):
                identity, content = self._nodes.recv_multipart()
                self._take(int.from_bytes(identity[1:], "big"), self._decoder.decode(content))
            if due.is_over:
                due.restart()
                self._send_all(Alive())
            for node, patience in self._patience.items():
                if patience.is_over and node not in self._gone:
                    why = f"node {node} has not been heard of for {SILENCE_SECONDS:g} s"
                    self._give_up(node, why, "check that machine and the network between")
            self._look_for_strangers()
        self._send_all(End(self._cause))
        self._context.destroy(linger=int(END_SECONDS * 1000))

    def _take(self, node: int, message: NodeMessage) -> None:
        if isinstance(message, Join):
            if fault := self._fault(message):
                self._give_up(node, fault, "start every node once, with the same version, files and device")
                self._send(node, End(fault))
                return
            self._patience[node] = Patience(SILENCE_SECONDS)
            self._send(node, Begin(self._options))
        elif node in self._patience:
            self._patience[node].restart()
            if isinstance(message, FromRank):
                self._note_stage(message.message)
                self._front.send(self._encoder.encode(message.message))
            elif isinstance(message, Leave) and node not in self._gone:
                self._give_up(node, f"node {node} has ended: {message.cause}", "see what it says, and start all again")

    def _note_stage(self, message: object) -> None:
        if isinstance(message, Stage):
            self._stages[message.rank] = message.name
        elif isinstance(message, Ready):
            self._stages[message.rank] = RUNNING

    def _look_for_strangers(self) -> None:
        if not self._warned and self._strangers.look():
            self._warned = True
            where = f"{self._cluster.host}:{self._cluster.port}"
            log.warning("somebody at %s has another %s: give all nodes the same secret", where, SECRET_VARIABLE)

    def _fault(self, join: Join) -> str:
        """Why a node cannot take part; empty when it can."""
        if not 0 < join.node < self._cluster.num_nodes:
            return f"node {join.node} is not one of {self._cluster.num_nodes}"
        if join.node in self._patience:
            return f"node {join.node} is there twice"
        if join.version != __version__:
            return f"node {join.node} runs mgtp {join.version}, node 0 runs {__version__}"
        if join.fingerprint != self._options.fingerprint:
            return f"node {join.node} has files of another shard set"
        if join.device != self._options.device:
            return f"node {join.node} runs on {join.device}, node 0 on {self._options.device}"
        return ""

    def _give_up(self, node: int, why: str, hint: str) -> None:
        """Report a node as the failure of its first rank."""
        self._gone.add(node)
        ranks = self._ranks_of(node)
        numbers = f" (ranks {ranks[0]} to {ranks[-1]})" if len(ranks) > 1 else ""
        stage = self._stages.get(ranks[0], SPAWN)
        self._front.send(self._encoder.encode(Failed(ranks[0], stage, why + numbers, hint, 5, False)))

    def _ranks_of(self, node: int) -> Sequence[int]:
        if not 0 < node < self._cluster.num_nodes:
            return [0]
        return self._cluster.ranks_of(node, self._options.num_ranks)

    def _send_all(self, message: FrontNodeMessage) -> None:
        for node in self._patience:
            self._send(node, message)

    def _send(self, node: int, message: FrontNodeMessage) -> None:
        self._nodes.send_multipart([node_identity(node), self._encoder.encode(message)])


def _check_ports(cluster: Cluster) -> None:
    """Raise MgtpError unless the ports that rank 0 will listen on are free: it would say so only later, and worse."""
    for port in range(cluster.port + 1, cluster.port + NUM_PORTS):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((cluster.host, port))
            except OSError as error:
                raise _no_port(cluster, port, error.errno or 0) from None


def _no_port(cluster: Cluster, port: int, number: int) -> MgtpError:
    given = f"--rendezvous {cluster.host}:{cluster.port}"
    hint = f"node 0 needs an address of its own, and {NUM_PORTS} ports in a row that are free"
    return MgtpError(f"{given}: port {port}: {os.strerror(number)}", hint)
