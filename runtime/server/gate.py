"""What every HTTP request passes first and last: size, key, state, one log line. Plain ASGI, so that streams stay streams."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from typing import Any
from urllib.parse import quote

from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import Metrics
from .options import ServerOptions
from .streaming import ClientGone

log = logging.getLogger("mgtp.server")

BODY_SECONDS = 60.0
"""How long a client may take to send its body."""

DISCARD_BYTES = 64 << 20
"""How much of a body that has been refused is read and thrown away."""

GONE = 499
"""What the log and the metrics say of a client that did not wait for its answer; nobody is told."""

_CLOSE = {"Connection": "close"}

OPEN_PATHS = ("/", "/health", "/ready", "/metrics")
"""Without a key: probes and scrapers have none, and the page asks for it."""


class Gate:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begin, status = time.monotonic(), 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        note: dict[str, Any] = scope.setdefault("mgtp", {})
        try:
            await self._enter(scope, receive, watched_send)
        except ClientGone:
            status = GONE
        except _TooLarge as error:
            await _answer_early(error, receive, watched_send)
        except ApiError as error:
            await error.response()(scope, receive, watched_send)
        except Exception as error:  # a fault of ours: one line, and the server goes on
            note["error"] = error
            if status == 0:
                await ApiError(500, f"unexpected {type(error).__name__}").response()(scope, receive, watched_send)
        finally:
            self._log(scope, status, time.monotonic() - begin, note)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if self._options.api_key is not None and scope["path"] not in OPEN_PATHS:
            _check_key(headers.get(b"authorization", b""), self._options.api_key)
        body = await self._read_body(receive, int(headers.get(b"content-length", b"0")))
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read_body(self, receive: Receive, announced: int) -> bytes:
        """The whole body; raises ApiError when it is, or says that it will be, too large, and when it takes too long."""
        limit, size, parts = self._options.max_body_bytes, 0, []
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    if max(size, announced) > limit:
                        raise _TooLarge(413, f"the body is larger than {limit} bytes", headers=_CLOSE)
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if not message.get("more_body") and size <= limit:
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", headers=_CLOSE) from None

    def _log(self, scope: Scope, status: int, seconds: float, note: dict[str, Any]) -> None:
        """One line a request, and its place in the metrics."""
        known = scope.get("route") is not None or scope["path"] in OPEN_PATHS
        path = getattr(scope.get("route"), "path", scope["path"]) if known else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        fields: dict[str, Any] = {
            "client": ":".join(map(str, scope["client"] or ())),
            "method": scope["method"],
            "path": quote(scope["path"][:200], safe="/:@!$&'()*+,;="),
            "status": status,
            "seconds": round(seconds, 4),
        }
        if "id" in note:
            generation = note["generation"]
            fields |= {"id": note["id"], "prompt_tokens": note["prompt_tokens"]}
            fields |= {"completion_tokens": generation.num_tokens, "finish": ",".join(generation.reasons)}
        error = note.get("error")
        if error is not None:
            fields["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        quiet = scope["path"] in OPEN_PATHS and error is None  # probes come every few seconds
        unexpected = error is not None and not isinstance(error, ApiError) and status in (0, 500)
        level = logging.ERROR if unexpected else logging.DEBUG if quiet else logging.INFO
        text = " ".join(f"{k}={json.dumps(v) if isinstance(v, str) and ' ' in v else v}" for k, v in fields.items())
        log.log(level, "request %s", text, extra={"fields": fields}, exc_info=error if log.isEnabledFor(10) else None)


class _TooLarge(ApiError):
    """The body is refused; the client may still be sending it."""


async def _answer_early(error: ApiError, receive: Receive, send: Send) -> None:
    """Answer at once, then hear the client out, within bounds: many look for an answer only when they have sent all."""
    response = error.response()
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    left, more = DISCARD_BYTES, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while more and left > 0:
                message = await receive()
                more, left = message.get("more_body", False), left - len(message.get("body", b""))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_key(header: bytes, key: str) -> None:
    """Raise ApiError unless the header carries the key; takes the same time however much of it is right."""
    scheme, _, given = header.partition(b" ")
    if not hmac.compare_digest(given.strip(), key.encode()) or scheme.lower() != b"bearer":
        raise ApiError(
            401,
            "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A small JSON answer."""
    from .streaming import encode

    return Response(encode(document), status, media_type="application/json", headers=headers)
