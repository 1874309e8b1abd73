"""A server from its bound port to its last answer: start the ranks, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from ...shardplan.errors import MgtpError
from ...shardplan.shard_set import ShardSet
from ..launch.async_ranks import AsyncRanks, start_ranks
from ..launch.start import LaunchOptions, StartedGroup
from .app import Server, build_app
from .engine_client import EngineClient
from .errors import unavailable
from .model import ServedModel
from .options import ServerOptions

log = logging.getLogger("mgtp.server")

LAST_WORDS_SECONDS = 1.0
"""How long answers and probes may take to learn of a failed rank before the server ends."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is loaded; raises MgtpError when the port cannot be had."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise MgtpError(f"--host {host!r} cannot be resolved: {error}", "use an address of this machine") from None
    sock = socket.socket(info[0], info[1])
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise MgtpError(f"{host}:{port}: {error.strerror}", "choose another --port, or --port 0 for any") from None
    return sock


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: who ends it is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    """One run of a server."""

    def __init__(self, shard_set: ShardSet, launch: LaunchOptions, options: ServerOptions, sock: socket.socket) -> None:
        self._shard_set, self._launch, self._options, self._sock = shard_set, launch, options, sock
        self.server = Server(ServedModel(options.model_name, shard_set, int(time.time())), options)
        self._http = _Http(self._http_config())
        self._exit_code = 0

    def _http_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            build_app(self.server),
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
        self._asked, self._hurried = asyncio.Event(), asyncio.Event()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        log.info("listening on %s", self._address())
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        started: StartedGroup | None = None
        starting = asyncio.create_task(start_ranks(self._shard_set, self._launch, on_stage))
        try:
            if await _first(starting, self._asked.wait()):
                started, ranks = starting.result()
                await self._serve(started, ranks)
        finally:
            self.server.is_draining = True
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
            self._http.should_exit = True
            with contextlib.suppress(Exception):
                await http
            if started is not None:
                started.group.stop()
        return self._exit_code

    def _address(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _on_signal(self, number: int) -> None:
        """The first signal asks for an orderly end, a second one for an immediate one."""
        if self._asked.is_set():
            self._hurried.set()
        self._exit_code = 0 if number == signal.SIGTERM and not self._hurried.is_set() else 128 + number
        self.server.is_draining = True
        self._asked.set()

    async def _serve(self, started: StartedGroup, ranks: AsyncRanks) -> None:
        """From ready ranks to drained ones."""
        options, server = self._options, self.server
        client = EngineClient(ranks, server.metrics, max_num_seqs=options.max_num_seqs, max_queue=options.max_queue)
        server.model.ready = started.ready
        server.metrics.observe_ready(started.ready)
        server.client = client
        tokens = started.ready[0].kv_cache_tokens
        log.info("%d rank(s) ready in %.1f s, KV cache for %d tokens", len(started.ready), started.seconds, tokens)
        log.info("serving %s on %s", server.model.name, self._address())
        routing = asyncio.create_task(client.run())
        try:
            if await _first(routing, self._asked.wait()):
                await self._end_failed(routing)
            await self._drain(client, routing)
        finally:
            routing.cancel()
            await asyncio.gather(routing, return_exceptions=True)
            ranks.close()

    async def _end_failed(self, routing: asyncio.Task[None]) -> None:
        """Let every client hear of a failed rank; raises its error."""
        await asyncio.wait((asyncio.create_task(self._hurried.wait()),), timeout=LAST_WORDS_SECONDS)
        routing.result()

    async def _drain(self, client: EngineClient, routing: asyncio.Task[None]) -> None:
        """Let running requests finish, for as long as they may; the rest is told."""
        if client.num_unfinished:
            log.info("draining: %d sequence(s), at most %g s", client.num_unfinished, self._options.drain_timeout)
        deadline = time.monotonic() + self._options.drain_timeout
        while client.num_unfinished and time.monotonic() < deadline and not self._hurried.is_set():
            await asyncio.sleep(0.02)
            if routing.done():
                await self._end_failed(routing)
        client.fail_all(unavailable("the server is shutting down", code="draining"))


async def _first(task: asyncio.Task, other) -> bool:
    """Wait for a task or for something else; whether the task has ended."""
    rival = asyncio.ensure_future(other)
    await asyncio.wait((task, rival), return_when=asyncio.FIRST_COMPLETED)
    rival.cancel()
    return task.done()
