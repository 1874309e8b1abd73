"""Clients that are slow, silent, deaf or too many, and what is no HTTP: each costs little, and for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from mgtp.runtime.server import connections
from mgtp.runtime.server.connections import Connection, Notices

SECONDS = 20


@contextlib.asynccontextmanager
async def listening(app: Any, most: int = 100) -> AsyncIterator[int]:
    """A server of `app` with these connections; its port."""
    http: Any = partial(Connection, most, Notices())
    server = uvicorn.Server(uvicorn.Config(app, http=http, log_config=None, lifespan="off", ws="none"))
    sock = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server._serve([sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def answer_at_once(scope, receive, send) -> None:
    """Does not wait for a body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def drip(writer: asyncio.StreamWriter, text: bytes) -> None:
    """Say the same over and over, slowly, until nobody listens."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(text)
            await writer.drain()
            await asyncio.sleep(0.02)


async def hear(port: int, first: bytes, then: bytes = b"") -> bytes:
    """What the server says until it hangs up, to a client that says `first` and then drips `then`."""
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        dripping = asyncio.create_task(drip(writer, then) if then else asyncio.sleep(0))
        said = b""
        with contextlib.suppress(ConnectionError):  # for what was dripped too late
            while part := await reader.read(1 << 16):
                said += part
        dripping.cancel()
        writer.close()
        return said


def error_of(answer: bytes) -> dict[str, Any]:
    """The error of an answer as it came over the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return json.loads(body)["error"]


def test_a_head_that_trickles_in(monkeypatch):
    async def work() -> None:
        async with listening(answer_at_once) as port:
            said = await hear(port, b"GET / HTTP/1.1\r\nHost: x\r\n", b"x-more: y\r\n")
            assert said.startswith(b"HTTP/1.1 408 ") and "did not come" in error_of(said)["message"]
            # The next request of a connection has no more time than the first.
            said = await hear(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /", b"x")
            assert said.count(b"HTTP/1.1") == 2 and b"HTTP/1.1 408 " in said

    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    asyncio.run(work())


def test_silence_and_a_body_that_nobody_wants(monkeypatch):
    async def work() -> None:
        async with listening(answer_at_once) as port:
            assert await hear(port, b"") == b""
            said = await hear(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", b"x")
            assert said.startswith(b"HTTP/1.1 200 ") and said.endswith(b"ok")

    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    asyncio.run(work())


@pytest.mark.parametrize("text", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: \x00\r\n\r\n"])
def test_what_is_no_http(text):
    async def work() -> None:
        async with listening(answer_at_once) as port:
            said = await hear(port, text + b"\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 400 ") and "valid HTTP" in error_of(said)["message"]

    asyncio.run(work())


def test_nonsense_in_a_body(caplog):
    """Whether or not the answer has begun: no traceback, and the application is told."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    heard: list[str] = []

    async def wait(scope, receive, send) -> None:
        while (message := await receive())["type"] != "http.disconnect" and message["more_body"]:
            pass
        heard.append(message["type"])
        await answer_at_once(scope, receive, send)

    async def work() -> None:
        async with listening(answer_at_once) as port:
            assert (await hear(port, head + b"1\r\nx\r\n", b"nonsense\r\n")).startswith(b"HTTP/1.1 ")
        async with listening(wait) as port:
            said = await hear(port, head, b"nonsense\r\n")
            assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1") == 1
            while not heard:
                await asyncio.sleep(0.01)

    asyncio.run(work())
    assert heard == ["http.disconnect"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_does_not_read(monkeypatch):
    """It is cut off; one that reads slowly is not."""

    async def talk(scope, receive, send) -> None:
        gone = asyncio.ensure_future(listen(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        gone.cancel()
        ends.append(gone.done())

    async def listen(receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def work() -> None:
        request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        async with listening(talk) as port, asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(request)
            while not ends:
                await asyncio.sleep(0.05)
            writer.transport.abort()
            ends.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(request)
            size = 0
            while part := await reader.read(1 << 20):
                size += len(part)
                await asyncio.sleep(0.001)
            assert size > 64 << 20

    ends: list[bool] = []
    monkeypatch.setattr(connections, "READ_SECONDS", 0.5)
    asyncio.run(work())


def test_too_many_connections():
    async def work() -> None:
        async with listening(answer_at_once, most=2) as port, asyncio.timeout(SECONDS):
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _ in range(50):
                said = await hear(port, b"")
                assert said.startswith(b"HTTP/1.1 503 ") and error_of(said)["code"] == "too_many_connections"
            kept[0][1].close()
            said = b""
            while not said.startswith(b"HTTP/1.1 200 "):
                said = await hear(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            kept[1][1].close()

    asyncio.run(work())


def test_open_files_set_the_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        most = connections.allow_connections()
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert most == now - connections.RESERVED_FILES
        assert now == (connections.MOST_FILES if hard < 0 else min(hard, connections.MOST_FILES))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_files_left(server):
    """Connections wait, the log says so once, and all is well as soon as there are files again."""
    pid, before = server.process.pid, len(server.log)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    waiting = []
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, limits[1]))
        for _ in range(20):
            waiting.append(socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), 10))
        server.wait_for_line("connections cannot be accepted")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    for each in waiting:
        each.settimeout(SECONDS)
        each.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert each.recv(15) == b"HTTP/1.1 200 OK"
        each.close()
    assert len([line for line in server.log[before:] if "cannot be accepted" in line]) == 1
