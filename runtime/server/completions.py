"""/v1/completions and /v1/chat/completions: from a body to a generation, and its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from ..messages import Request
from ..sampling_params import SamplingParams
from . import prompts
from .errors import ApiError
from .forms import ChatForm, CompletionForm, Form
from .generation import Answer, Generation, merge
from .protocol import ChatRequest, CompletionRequest, Sampling
from .streaming import EventStream, encode, unless_gone
from .structured import read_format
from .tools import ToolUse

if TYPE_CHECKING:
    from .app import Server
    from .host import ModelHost

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default of /v1/completions; a chat may use what is left of the context."""


async def complete(server: Server, http: HttpRequest, body: CompletionRequest) -> Response:
    """Answer /v1/completions."""
    host, limits = server.find(body.model), server.options
    model = host.model
    options = prompts.read_options(body, model, limits, body.logprobs)
    n, stop = prompts.read_n(body.n, limits), prompts.read_stop(body.stop, model, limits)
    max_tokens = prompts.read_max_tokens(body.max_tokens, "max_tokens", 0, DEFAULT_COMPLETION_TOKENS)
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo together with logprobs is not supported", param="echo")
    ids = await prompts.read_prompts(model, body.prompt)
    for prompt in ids:
        # Without a value, the answer is as long as there is room for.
        prompts.check_prompt(prompt, max(1, max_tokens) if body.max_tokens is not None else 1, model)
    echoes = [model.tokenizer.decode(prompt) for prompt in ids] if body.echo and model.tokenizer.has_text else None
    with_ids = bool(body.return_token_ids)
    form = CompletionForm(model, ids, n, body.logprobs is not None, with_ids, echoes)
    if max_tokens == 0:
        return await _nothing(server, host, body, form)
    room = [min(max_tokens, model.max_model_len - len(prompt)) for prompt in ids]
    grammar = await read_format(model, body.response_format)
    answers = _answers(form, options, room, stop, grammar, continues=True)
    return await _respond(server, host, http, body, form, answers)


async def chat(server: Server, http: HttpRequest, body: ChatRequest) -> Response:
    """Answer /v1/chat/completions."""
    host, limits = server.find(body.model), server.options
    model = host.model
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    options = prompts.read_options(body, model, limits, (body.top_logprobs or 0) if body.logprobs else None)
    n, stop = prompts.read_n(body.n, limits), prompts.read_stop(body.stop, model, limits)
    given, name = prompts.chat_max_tokens(body)
    max_tokens = prompts.read_max_tokens(given, name, 1, 1)
    tools = ToolUse.of(body, model)
    ids = await prompts.read_conversation(model, body.messages, tools.documents, body.chat_template_kwargs)
    prompts.check_prompt(ids, max_tokens, model)
    grammar = await (tools.grammar(model) if tools.forced else read_format(model, body.response_format))
    form = ChatForm(model, [ids], n, bool(body.logprobs), bool(body.return_token_ids), tools)
    room = max_tokens if given is not None else model.max_model_len - len(ids)
    answers = _answers(form, options, [room], stop, grammar, continues=False)
    return await _respond(server, host, http, body, form, answers)


def _answers(
    form: Form,
    options: SamplingParams,
    room: Sequence[int],
    stop: Sequence[str],
    grammar: str | None,
    *,
    continues: bool,
) -> list[Answer]:
    """The sequences of a request: n answers to every prompt, of at most `room` tokens."""
    answers = []
    for ids, tokens in zip(form.prompts, room, strict=True):
        sampling = msgspec.structs.replace(options, max_tokens=tokens).with_seed()
        for choice in range(form.n):
            index = len(answers)
            request = Request(f"{form.id}-{index}", ids, sampling, form.model.eos_ids, grammar)
            request = prompts.with_choice_seed(request, choice)
            answers.append(Answer(index, request, form.model, stop, continues))
    return answers


async def _respond(
    server: Server, host: ModelHost, http: HttpRequest, body: Sampling, form: Form, answers: Sequence[Answer]
) -> Response:
    """Run the generation; its stream, or the whole answer."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    server.check_open()
    generation = Generation(host.client, answers, server.options.request_timeout, server.metrics)
    prompt_tokens = sum(map(len, form.prompts))
    server.metrics.prompt_tokens.inc(prompt_tokens)
    note = http.scope.setdefault("mgtp", {})
    note.update(id=form.id, prompt_tokens=prompt_tokens, generation=generation)
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(_events(form, generation, with_usage), generation.close)
    try:
        pieces = await unless_gone(http.receive, _collect(generation))
    finally:
        generation.close()
    return _json(form.whole(merge(pieces, len(answers)), generation.num_tokens))


async def _events(form: Form, generation: Generation, with_usage: bool) -> AsyncGenerator[dict[str, Any], None]:
    """The documents of a stream; with usage, all of them have the field and the last one has the numbers."""
    for event in form.opening():
        yield {**event, "usage": None} if with_usage else event
    async for piece in generation:
        for event in form.events(piece):
            yield {**event, "usage": None} if with_usage else event
    if with_usage:
        yield {**form.chunk([]), "usage": form.usage(generation.num_tokens)}


async def _collect(generation: Generation) -> list[Any]:
    return [piece async for piece in generation]


async def _nothing(server: Server, host: ModelHost, body: CompletionRequest, form: CompletionForm) -> Response:
    """The answer to max_tokens 0: the prompt where it is echoed, and nothing generated."""
    server.check_open()
    _ = host.client
    answers = merge([], len(form.prompts) * form.n)
    for answer in answers:
        answer.finish_reason = "length"
    if not body.stream:
        return _json(form.whole(answers, 0))

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        for event in (*form.opening(), *(e for answer in answers for e in form.events(answer))):
            yield event
        if body.stream_options and body.stream_options.include_usage:
            yield {**form.chunk([]), "usage": form.usage(0)}

    return EventStream(events(), lambda: None)


def _json(document: Any) -> Response:
    return Response(encode(document), media_type="application/json")
