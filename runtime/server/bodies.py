"""From a body to what it asks for: the sequences that the ranks are to run, and the form of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..messages import Request
from ..sampling_params import SamplingParams
from . import prompts
from .errors import ApiError
from .forms import ChatForm, CompletionForm, Form
from .generation import Answer, Piece
from .model import ServedModel
from .options import ServerOptions
from .protocol import ChatRequest, CompletionRequest
from .structured import read_format
from .tools import ToolUse

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default of /v1/completions; a chat may use what is left of the context."""


@dataclass(frozen=True)
class Asked:
    """What a body asks for. Without `answers`, nothing is to be generated."""

    form: Form
    answers: list[Answer]


async def read_completion(
    model: ServedModel, limits: ServerOptions, body: CompletionRequest, default_tokens: int = DEFAULT_COMPLETION_TOKENS
) -> Asked:
    """What a body of /v1/completions asks for; raises ApiError for all that a client can get wrong.

    `default_tokens`: how many to generate where it does not say.
    """
    options = prompts.read_options(body, model, limits, body.logprobs)
    n, stop = prompts.read_n(body.n, limits), prompts.read_stop(body.stop, model, limits)
    max_tokens = prompts.read_max_tokens(body.max_tokens, "max_tokens", 0, default_tokens)
    scores = bool(body.echo) and body.logprobs is not None
    if scores:
        options = msgspec.structs.replace(options, prompt_logprobs=body.logprobs)
    ids = await prompts.read_prompts(model, body.prompt, max(1, (limits.max_num_seqs + limits.max_queue) // n))
    for prompt in ids:
        # Without a value, the answer is as long as there is room for.
        prompts.check_prompt(prompt, max_tokens if body.max_tokens is not None else 1, model)
    echoes = None
    if body.echo and model.tokenizer.has_text:
        echoes = await model.off_loop(sum(map(len, ids)), lambda: [model.tokenizer.decode(prompt) for prompt in ids])
    form = CompletionForm(model, ids, n, body.logprobs is not None, bool(body.return_token_ids), echoes, scores)
    if max_tokens == 0 and not scores:
        return Asked(form, [])
    room = [min(max_tokens, model.max_model_len - len(prompt)) for prompt in ids]
    grammar = await read_format(model, body.response_format)
    return Asked(form, _answers(form, options, room, stop, grammar, continues=True))


async def read_chat(
    model: ServedModel, limits: ServerOptions, body: ChatRequest, default_tokens: int = 1 << 40
) -> Asked:
    """What a body of /v1/chat/completions asks for; like `read_completion`. By default there is all the room left."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    options = prompts.read_options(
        body, model, limits, (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs"
    )
    n, stop = prompts.read_n(body.n, limits), prompts.read_stop(body.stop, model, limits)
    given, name = prompts.chat_max_tokens(body)
    max_tokens = prompts.read_max_tokens(given, name, 1, default_tokens)
    tools = ToolUse.of(body, model)
    ids = await prompts.read_conversation(model, body.messages, tools.documents, body.chat_template_kwargs)
    prompts.check_prompt(ids, max_tokens if given is not None else 1, model, "messages")
    grammar = await (tools.grammar(model) if tools.forced else read_format(model, body.response_format))
    form = ChatForm(model, [ids], n, bool(body.logprobs), bool(body.return_token_ids), tools)
    room = min(max_tokens, model.max_model_len - len(ids))
    return Asked(form, _answers(form, options, [room], stop, grammar, continues=False))


def unanswered(form: Form) -> list[Piece]:
    """The answers to max_tokens 0."""
    return [Piece(index, finish_reason="length") for index in range(len(form.prompts) * form.n)]


def _answers(
    form: Form,
    options: SamplingParams,
    room: Sequence[int],
    stop: Sequence[str],
    grammar: str | None,
    *,
    continues: bool,
) -> list[Answer]:
    """The sequences of a request: n answers to every prompt, of at most `room` tokens.

    A prompt that is only scored has one as well, since that is what makes the ranks compute it, and is not shown.
    """
    answers = []
    for ids, tokens in zip(form.prompts, room, strict=True):
        sampling = msgspec.structs.replace(options, max_tokens=max(1, tokens)).with_seed()
        for choice in range(form.n):
            index = len(answers)
            request = Request(f"{form.id}-{index}", ids, sampling, form.model.eos_ids, grammar)
            request = prompts.with_choice_seed(request, choice)
            answers.append(Answer(index, request, form.model, stop, continues, is_empty=tokens == 0))
    return answers
