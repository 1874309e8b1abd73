"""Encrypted ZeroMQ sockets between machines that share a secret (CurveZMQ). No torch.

Both sides derive the same key pairs from the secret. A client proves that it knows the secret by knowing the server's
public key, which is never sent; what is sent can be neither read nor changed nor replayed on the way.
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85


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


def _key_pair(role: str, secret: str) -> tuple[bytes, bytes]:
    # scrypt, since secrets that people choose are short.
    seed = hashlib.scrypt(secret.encode(), salt=f"mgtp {role}".encode(), n=1 << 14, r=8, p=1, dklen=32)
    private = z85.encode(seed)
    return zmq.curve_public(private), private
