"""The application: which path does what, and what the server knows while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from ...shardplan.errors import MgtpError
from ...shardplan.version import __version__
from . import completions, prompts, status_page
from .admin import admin_router, describe
from .changes import Changes
from .errors import ApiError, Replaced, on_error, on_http_exception, on_invalid, unavailable
from .gate import Gate, json_response
from .host import ModelHost
from .metrics import Metrics
from .models import Models
from .options import ServerOptions
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_ERROR_SCHEMA = {
    "description": "An error in OpenAI's form.",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 404, 408, 413, 422, 429, 500, 503, 504), _ERROR_SCHEMA
)

_ANSWERS = {**_ERRORS, 200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""With stream: true, events instead of a document."""


class Server:
    """What the endpoints share."""

    def __init__(self, models: Models, options: ServerOptions, metrics: Metrics) -> None:
        self.models, self.options, self.metrics = models, options, metrics
        self.is_draining = False

    @property
    def status(self) -> str:
        """That of the models (see Models.status), or 'draining'."""
        status = self.models.status
        return "draining" if self.is_draining and status != "failed" else status

    def check_open(self) -> None:
        """Raise ApiError while the server is shutting down."""
        if self.is_draining:
            raise unavailable("the server is shutting down", code="draining")

    async def ask(self, name: str | None, work: Callable[[ModelHost], Awaitable[Response]]) -> Response:
        """What `work` makes of the model of that name: of its successor, when it is replaced meanwhile."""
        while True:
            host = self.models.find(name)
            try:
                return await work(host)
            except Replaced:
                if self.models.find(name) is host:
                    raise


def build_app(server: Server) -> ASGIApp:
    """The ASGI application."""
    app = FastAPI(title="mgtp", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(MgtpError, on_error)
    app.add_exception_handler(Exception, on_error)  # a fault of ours, in the same form
    _add_generation(app, server)
    _add_model(app, server)
    _add_life(app, server)
    if server.options.model_root is not None:
        app.include_router(admin_router(Changes(server.models), server.options.model_root, _ERRORS))
    return Gate(app, server.options, server.metrics)


def _add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=_ANSWERS, response_model=None)
    async def completions_(request: Request, body: CompletionRequest) -> Response:
        """Continue one prompt or several."""
        return await server.ask(body.model, lambda host: completions.complete(server, host, request, body))

    @app.post("/v1/chat/completions", responses=_ANSWERS, response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await server.ask(body.model, lambda host: completions.chat(server, host, request, body))


def _add_model(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> Response:
        """The models that are served."""
        return json_response({"object": "list", "data": [describe(host) for host in server.models]})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> Response:
        """One model."""
        return json_response(describe(server.models.find(name)))

    @app.post("/tokenize", responses=_ERRORS, response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The ids of a text, or of a conversation as the model would see it."""
        model = server.models.find(body.model).model
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give one of 'prompt' and 'messages'", param="prompt")
        if body.messages is not None:
            ids = await prompts.read_conversation(model, body.messages, None, None)
        else:
            (ids,) = await model.encode([body.prompt or ""], "prompt", body.add_special_tokens)
        length = model.max_model_len
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": length})

    @app.post("/detokenize", responses=_ERRORS, response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        model = server.models.find(body.model).model
        bad = next((i for i in body.tokens if not 0 <= i < model.vocab_size), None)
        if bad is not None:
            top = model.vocab_size - 1
            raise ApiError(400, f"a token id is outside the vocabulary, 0 to {top}", param="tokens")
        tokenizer = model.tokenizer
        if not tokenizer.has_text:
            raise ApiError(400, "this model has no tokenizer", param="tokens")
        text = await model.off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return json_response({"prompt": text})


def _add_life(app: FastAPI, server: Server) -> None:
    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        """Whether the server lives: 503 as soon as a rank has failed for good."""
        status = server.status
        return json_response({"status": status}, 503 if status == "failed" else 200)

    @app.get("/ready", responses=_ERRORS)
    async def ready() -> Response:
        """Whether requests are taken: 503 while loading, restarting, draining, stalled or failed."""
        status = server.status
        if status == "ready":
            return json_response({"status": status})
        return json_response({"status": status}, 503, {"Retry-After": "5"})

    @app.get("/metrics", responses=_ERRORS, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text form."""
        for host in server.models:
            host.look_at_ranks()
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/status", responses=_ERRORS)
    async def status() -> Response:
        """The figures of the status page."""
        return json_response(status_page.status(server))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The status page."""
        return Response(status_page.page(), media_type="text/html; charset=utf-8", headers=status_page.HEADERS)
