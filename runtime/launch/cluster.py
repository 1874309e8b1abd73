"""Ranks on several nodes: which node has which, and where they meet."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from ...shardplan.errors import UsageError
from ...shardplan.sharing import share
from ...shardplan.values import counted
from ..rank_link import SECRET_VARIABLE

SHORTEST_SECRET = 16
NUM_PORTS = 3
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` machines, of which this is `node`. Node 0 listens on `host`: `port` for the other nodes, the next one for
    steps, the one after that for torch.distributed to meet."""

    num_nodes: int
    node: int
    host: str
    port: int
    secret: str

    def ranks_of(self, node: int, num_ranks: int) -> range:
        """The ranks of a node: neighbours, as many on each as can be."""
        first, end = share(num_ranks, [1] * self.num_nodes)[node]
        return range(first, end)

    @property
    def steps(self) -> str:
        """Where followers get their steps."""
        return f"tcp://{self.host}:{self.port + 1}"

    @property
    def rendezvous(self) -> str:
        """Where torch.distributed meets."""
        return f"tcp://{self.host}:{self.port + 2}"

    def environment(self) -> dict[str, str]:
        """Variables of every rank here: the interface towards node 0, since a host's name may resolve to any."""
        interface = interface_towards(self.host)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
        return {name: os.environ.get(name, interface) for name in names}


def parse_cluster(num_nodes: int, node: int | None, rendezvous: str | None, num_ranks: int) -> Cluster:
    """The cluster that options describe; raises UsageError naming the one that is wrong."""
    if num_nodes == 1:
        raise UsageError("--node-rank and --rendezvous are for several nodes", "add --nnodes N, or leave them out")
    if rendezvous is None or node is None:
        missing = "--node-rank" if node is None else "--rendezvous"
        raise UsageError(
            f"--nnodes {num_nodes} needs {missing}", "every node runs: --nnodes N --node-rank I --rendezvous HOST:PORT"
        )
    if not 0 <= node < num_nodes:
        raise UsageError(f"--node-rank {node} does not exist", f"valid: 0 to {num_nodes - 1}")
    if num_ranks < num_nodes:
        raise UsageError(
            f"--nnodes {num_nodes}, but the set has {counted(num_ranks, 'rank')}", "every node runs one rank or more"
        )
    host, _, port = rendezvous.rpartition(":")
    highest = 65535 - NUM_PORTS + 1
    if not host or not port.isdecimal() or not 0 < int(port) <= highest:
        raise UsageError(
            f"--rendezvous {rendezvous!r} is not HOST:PORT", f"an address of node 0 and a port up to {highest}"
        )
    return Cluster(num_nodes, node, _resolve(host, rendezvous), int(port), _secret())


def _secret() -> str:
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < SHORTEST_SECRET:
        raise UsageError(
            f"{SECRET_VARIABLE} has {len(secret)} characters, {SHORTEST_SECRET} are the fewest",
            f"give all nodes the same secret: export {SECRET_VARIABLE}=$(head -c 32 /dev/urandom | base64)",
        )
    return secret


def _resolve(host: str, given: str) -> str:
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--rendezvous {given!r} cannot be resolved: {error}", "use an IPv4 address of node 0"
        ) from None


def interface_towards(host: str) -> str:
    """The network interface through which this machine reaches `host`; empty when that cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # chooses the route; nothing is sent
        except OSError:
            return ""
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
