"""Answers over a connection that may go away: whatever is being computed for it ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import as_api_error

T = TypeVar("T")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]

encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The connection was closed before the answer was complete; there is nobody to tell."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (raises ClientGone)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: a JSON document each, `[DONE]` last, or an error event where the stream breaks.

    Documents that come together are sent together.
    """

    media_type = "text/event-stream"

    def __init__(self, documents: AsyncGenerator[list[Any], None], close: Callable[[], None]) -> None:
        """`close` is called when the stream has ended, however it did, even before it began."""
        super().__init__()
        self._documents, self._close = documents, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._write(scope, send))
        finally:
            self._close()

    async def _write(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with aclosing(self._documents):
                async for documents in self._documents:
                    if documents:
                        await _send(send, b"".join(map(_event, documents)))
            await _send(send, b"data: [DONE]\n\n")
        except Exception as error:
            scope.setdefault("mgtp", {})["error"] = error
            await _send(send, _event(as_api_error(error).document()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(document: Any) -> bytes:
    return b"data: " + encode(document) + b"\n\n"


async def _send(send: Send, content: bytes) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": True})
