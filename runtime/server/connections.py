"""Connections below HTTP: how many there may be, how long a client may be silent, and what is said to nonsense.

uvicorn itself waits for ever for a request to be complete, and for a client to read its answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .errors import ApiError, unavailable

log = logging.getLogger("mgtp.server")

HEAD_SECONDS = 60.0
"""How long a client may take to send the head of a request. (Its body is read, and timed, by gate.py.)"""

READ_SECONDS = 60.0
"""How long a client may read nothing, once what was sent does not fit into its connection any more."""

RESERVED_FILES = 128
"""Open files that are no connections: ranks, logs, models that are being loaded."""

MOST_FILES = 1 << 16

NOTICE_SECONDS = 60.0
"""How often the log says at most that connections are refused."""


def allow_connections() -> int:
    """How many connections there may be: as many as files may be open, of which as many are asked for as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # some systems have another limit besides
    return max(1, (MOST_FILES if soft == resource.RLIM_INFINITY else soft) - RESERVED_FILES)


def notice_dead_peers(sock: socket.socket) -> None:
    """Let the system end connections, of those that `sock` accepts, whose other end has vanished without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # macOS names them otherwise
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Notices:
    """Says the same thing at most every NOTICE_SECONDS, however often it happens."""

    def __init__(self) -> None:
        self._next, self._unsaid = -math.inf, 0

    def warn(self, text: str) -> None:
        """Log a warning, unless one was logged a moment ago."""
        self._unsaid += 1
        if time.monotonic() >= self._next:
            log.warning("%s (times since the last such line: %d)", text, self._unsaid)
            self._next, self._unsaid = time.monotonic() + NOTICE_SECONDS, 0


def watch_accepting(loop: asyncio.AbstractEventLoop, notices: Notices) -> None:
    """Keep the log short when connections cannot be accepted: asyncio reports every attempt, thousands a second."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket.accept()" in context.get("message", ""):
            notices.warn(f"connections cannot be accepted: {context.get('exception')}")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class Connection(H11Protocol):
    """One client's connection. `most` and `notices` are those of the server."""

    def __init__(self, most: int, notices: Notices, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._most, self._notices = most, notices
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._notices.warn(f"{self._most} connections are open, more are refused")
            self._end(unavailable("there are too many connections", code="too_many_connections"))
        else:
            self._limit_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._late = _cancel(self._late)
        else:
            self._limit_request()

    @property
    def _is_answering(self) -> bool:
        """Whether a request has come, which the application looks after until it is answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _limit_request(self) -> None:
        """A request has begun, or is expected: its head must be there in time, however slowly the bytes trickle in."""
        if self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(HEAD_SECONDS, self._end_late)

    def _end_late(self) -> None:
        if self._is_answering:
            return
        if self.conn.trailing_data[0]:
            self._end(ApiError(408, f"the request did not come within {HEAD_SECONDS:g} s"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(READ_SECONDS, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_reader()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        self._unread = _cancel(self._unread)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late, self._unread = _cancel(self._late), _cancel(self._unread)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._end(ApiError(400, "this is not valid HTTP"))

    def _end(self, error: ApiError) -> None:
        """Say why, unless an answer has begun, and hang up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            reason = STATUS_PHRASES[error.status]
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self._is_answering:  # the application hears that the client has gone, and can say no more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
