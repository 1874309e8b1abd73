"""Encrypted ZeroMQ sockets between machines that share a secret (CurveZMQ). No torch.

Both sides derive the same key pairs from the secret. A client proves that it knows the secret by knowing the server's
public key, which is never sent; what is sent can be neither read nor changed nor replayed on the way.
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

_UNREADABLE = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC


def listen(socket: zmq.Socket, endpoint: str, secret: str) -> None:
    """Bind a socket that only clients with the same secret can talk to."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = _key_pair("server", secret)
    socket.bind(endpoint)


def connect(socket: zmq.Socket, endpoint: str, secret: str) -> None:
    """Connect a socket to one that listens with the same secret."""
    socket.curve_serverkey = _key_pair("server", secret)[0]
    socket.curve_publickey, socket.curve_secretkey = _key_pair("client", secret)
    socket.connect(endpoint)


class Strangers:
    """Counts how often the two sides of a socket did not understand each other: their secrets differ.

    The side that listens knows it; the one that connects sees only that the other hangs up.
    """

    def __init__(self, socket: zmq.Socket, *, listens: bool) -> None:
        failed = zmq.Event.HANDSHAKE_FAILED_PROTOCOL if listens else zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        self._events = socket.get_monitor_socket(failed)
        self._listens, self._count = listens, 0

    def look(self) -> int:
        """How often until now."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            self._count += not self._listens or event["value"] == _UNREADABLE
        return self._count


def _key_pair(role: str, secret: str) -> tuple[bytes, bytes]:
    # scrypt, since secrets that people choose are short.
    seed = hashlib.scrypt(secret.encode(), salt=f"mgtp {role}".encode(), n=1 << 14, r=8, p=1, dklen=32)
    private = z85.encode(seed)
    return zmq.curve_public(private), private
