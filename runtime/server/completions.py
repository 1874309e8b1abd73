"""/v1/completions and /v1/chat/completions: from a body to a generation, and its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from .bodies import read_chat, read_completion, unanswered
from .errors import ApiError
from .forms import CompletionForm, Form
from .generation import Answer, Generation, Piece, merge
from .protocol import ChatRequest, CompletionRequest, Sampling
from .streaming import EventStream, encode, unless_gone

if TYPE_CHECKING:
    from .app import Server
    from .host import ModelHost


async def complete(server: Server, host: ModelHost, http: HttpRequest, body: CompletionRequest) -> Response:
    """Answer /v1/completions."""
    asked = await unless_gone(http.receive, read_completion(host.model, server.options, body))
    if not asked.answers:
        assert isinstance(asked.form, CompletionForm)
        return await _nothing(server, host, body, asked.form)
    return await _respond(server, host, http, body, asked.form, asked.answers)


async def chat(server: Server, host: ModelHost, http: HttpRequest, body: ChatRequest) -> Response:
    """Answer /v1/chat/completions."""
    asked = await unless_gone(http.receive, read_chat(host.model, server.options, body))
    return await _respond(server, host, http, body, asked.form, asked.answers)


async def _respond(
    server: Server, host: ModelHost, http: HttpRequest, body: Sampling, form: Form, answers: Sequence[Answer]
) -> Response:
    """Run the generation; its stream, or the whole answer."""
    with_usage = _wants_usage(body)
    server.check_open()
    generation = Generation(host.client, answers, server.options.request_timeout, host.metrics)
    prompt_tokens = sum(map(len, form.prompts))
    host.metrics.prompt_tokens.inc(prompt_tokens)
    note = http.scope.setdefault("mgtp", {})
    note.update(id=form.id, prompt_tokens=prompt_tokens, generation=generation)
    if body.stream:
        return EventStream(_events(form, generation, with_usage), generation.close)
    try:
        pieces = await unless_gone(http.receive, _collect(generation))
    finally:
        generation.close()
    tokens = generation.num_tokens
    size = prompt_tokens + tokens
    content = await form.model.off_loop(size, lambda: encode(form.whole(merge(pieces, len(answers)), tokens)))
    return Response(content, media_type="application/json")


def _wants_usage(body: Sampling) -> bool:
    """Whether a stream is to have token counts."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)


async def _events(form: Form, generation: Generation, with_usage: bool) -> AsyncGenerator[list[dict[str, Any]], None]:
    """The documents of a stream; with usage, all of them have the field and the last one has the numbers."""
    no_usage = {"usage": None} if with_usage else {}
    yield [event | no_usage for event in form.opening()]
    async for pieces in generation:
        # Log-probabilities of a long prompt take a while to write down.
        size = sum(len(piece.prompt) for piece in pieces if piece.prompt is not None)
        events = await form.model.off_loop(size, lambda: [event for piece in pieces for event in form.events(piece)])  # noqa: B023
        yield [event | no_usage for event in events]
    if with_usage:
        yield [form.chunk([]) | {"usage": form.usage(generation.num_tokens)}]


async def _collect(generation: Generation) -> list[Piece]:
    return [piece async for pieces in generation for piece in pieces]


async def _nothing(server: Server, host: ModelHost, body: CompletionRequest, form: CompletionForm) -> Response:
    """The answer to max_tokens 0: the prompt where it is echoed, and nothing generated."""
    with_usage = _wants_usage(body)
    server.check_open()
    _ = host.client
    answers = unanswered(form)
    if not body.stream:
        return Response(encode(form.whole(answers, 0)), media_type="application/json")

    async def events() -> AsyncGenerator[list[dict[str, Any]], None]:
        no_usage = {"usage": None} if with_usage else {}
        said = [*form.opening(), *(event for answer in answers for event in form.events(answer))]
        yield [event | no_usage for event in said]
        if with_usage:
            yield [form.chunk([]) | {"usage": form.usage(0)}]

    return EventStream(events(), lambda: None)
