"""A server from its bound port to its last answer: start the ranks, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import uvicorn

from ...shardplan.errors import MgtpError
from ...shardplan.shard_set import ShardSet
from ...shardplan.values import counted
from ..launch.start import LaunchOptions
from .app import Server, build_app
from .connections import Connection, Notices, allow_connections, notice_dead_peers, watch_accepting
from .errors import unavailable
from .metrics import Metrics
from .models import Models
from .options import ServerOptions

log = logging.getLogger("mgtp.server")

LAST_WORDS_SECONDS = 1.0
"""How long answers and probes may take to learn of a failed rank before the server ends."""

_EXIT_CODES: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143}
"""Of an end that a signal has asked for, but for the first SIGTERM: that is an end in order."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is loaded; raises MgtpError when the port cannot be had."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise MgtpError(f"--host {host!r} cannot be resolved: {error}", "use an address of this machine") from None
    sock = socket.socket(info[0], info[1])
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        notice_dead_peers(sock)
        sock.bind(info[4])
        sock.listen(2048)
    except OSError as error:
        sock.close()
        ways = {errno.EADDRNOTAVAIL: "use an address of this machine with --host, or 0.0.0.0 for all of them"}
        hint = ways.get(error.errno or 0, "choose another --port, or --port 0 for any")
        raise MgtpError(f"{host}:{port}: {error.strerror}", hint) from None
    return sock


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: who ends it is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    """One run of a server."""

    def __init__(
        self, sets: Mapping[str, ShardSet], launch: LaunchOptions, options: ServerOptions, sock: socket.socket
    ) -> None:
        self._options, self._sock = options, sock
        metrics = Metrics()
        self.models = Models(launch, options, metrics)
        for name, shard_set in sets.items():
            self.models.add(name, shard_set)
        self.server = Server(self.models, options, metrics)
        self._notices = Notices()
        self._http = _Http(self._http_config())
        self._exit_code = 0

    def _http_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            build_app(self.server),
            http=cast("type[asyncio.Protocol]", partial(Connection, allow_connections(), self._notices)),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )

    async def run(self, on_stage: Callable[[int, str], None] | None = None) -> int:
        """Serve until a signal has been handled; the exit code. Raises MgtpError when ranks do not start or one fails."""
        loop = asyncio.get_running_loop()
        watch_accepting(loop, self._notices)
        self._asked, self._hurried = asyncio.Event(), asyncio.Event()
        for number in (n for n in _EXIT_CODES if signal.getsignal(n) is not signal.SIG_IGN):  # nohup ignores SIGHUP
            loop.add_signal_handler(number, self._on_signal, number)
        log.info("listening on %s", self._address())
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        serving = asyncio.create_task(self.models.run(on_stage))
        try:
            if await _first(serving, self._asked.wait()):
                await self._end_failed(serving)
            await self._drain(serving)
        finally:
            self.server.is_draining = True
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self.models.stop()
            self._http.should_exit = True
            with contextlib.suppress(Exception):
                await http
        return self._exit_code

    def _address(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _on_signal(self, number: int) -> None:
        """The first signal asks for an orderly end, a second one for an immediate one."""
        if self._asked.is_set():
            self._hurried.set()
        in_order = number == signal.SIGTERM and not self._hurried.is_set()
        self._exit_code = 0 if in_order else _EXIT_CODES[number]
        self.server.is_draining = True
        self.models.end()
        self._asked.set()

    async def _end_failed(self, serving: asyncio.Task[None]) -> None:
        """Let every client hear of a failed rank; raises its error."""
        if self.models.have_served:
            await asyncio.wait((asyncio.create_task(self._hurried.wait()),), timeout=LAST_WORDS_SECONDS)
        serving.result()

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Let running requests finish, for as long as they may; the rest is told."""
        models = self.models
        if models.num_unfinished:
            sequences = counted(models.num_unfinished, "sequence")
            log.info("draining: %s, at most %g s", sequences, self._options.drain_timeout)
        deadline = time.monotonic() + self._options.drain_timeout
        while models.num_unfinished and time.monotonic() < deadline and not self._hurried.is_set():
            await asyncio.sleep(0.02)
            if serving.done():
                await self._end_failed(serving)
        models.fail_all(unavailable("the server is shutting down", code="draining"))


async def _first(task: asyncio.Task, other) -> bool:
    """Wait for a task or for something else; whether the task has ended."""
    rival = asyncio.ensure_future(other)
    await asyncio.wait((task, rival), return_when=asyncio.FIRST_COMPLETED)
    rival.cancel()
    return task.done()
