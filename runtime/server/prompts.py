"""From a request's body to prompts and options for the leader: everything a client can get wrong is found here."""

from __future__ import annotations

import json
import re
from typing import Any

from ...shardplan.errors import UsageError
from ...shardplan.values import counted
from ..messages import Request
from ..sampling_params import SamplingParams
from .errors import ApiError, usage_error
from .model import ServedModel
from .options import ServerOptions
from .protocol import ChatRequest, Message, Sampling

MAX_STOP_CHARACTERS = 1024

_MESSAGE_CHARACTERS = 64
"""What a template writes around a message takes time too."""

_TOKEN_ID = re.compile("-?(0|[1-9][0-9]*)", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")

_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
_RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "self")


async def read_prompts(model: ServedModel, prompt: Any, most: int) -> list[list[int]]:
    """The ids of every prompt of a completion request: text, ids, or a list of either, of no more than `most`."""
    if prompt is None:
        raise ApiError(400, "parameter 'prompt' is missing", param="prompt")
    single = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and _is_int(prompt[0]))
    prompts = [prompt] if single else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ApiError(400, "prompt must be text, token ids, or a list of either, and not empty", param="prompt")
    if len(prompts) > most:
        raise ApiError(400, f"{len(prompts)} prompts at once, the server takes {most}", param="prompt")
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and {int}.issuperset(map(type, each))):
            raise ApiError(400, "prompt must be text, token ids, or a list of either, not mixed", param="prompt")
    texts = iter(await model.encode([each for each in prompts if isinstance(each, str)], "prompt"))
    return [next(texts) if isinstance(each, str) else each for each in prompts]


async def read_conversation(
    model: ServedModel, messages: list[Message], tools: list[dict[str, Any]] | None, variables: dict[str, Any] | None
) -> list[int]:
    """The ids of a conversation, through the model's chat template."""
    plain = [_plain_message(message, index) for index, message in enumerate(messages)]
    variables = variables or {}
    for name in _RESERVED_VARIABLES:
        if name in variables:
            raise ApiError(400, f"chat_template_kwargs cannot set {name!r}", param="chat_template_kwargs")
    size = sum(_MESSAGE_CHARACTERS + len(m["content"] or "") for m in plain)
    text = await model.off_loop(size, lambda: model.template.render(plain, True, tools, **variables))
    return (await model.encode([text], "messages", add_special_tokens=False))[0]


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of tool calls as objects."""
    says_more = any(value is not None for value in (message.model_extra or {}).values())
    if message.content is None and not (message.role == "assistant" and says_more):
        name = f"messages.{index}.content"
        raise ApiError(400, f"{name} is missing: only an assistant that calls tools may say nothing", param=name)
    fields = {"role": message.role, "content": _text(message.content), **(message.model_extra or {})}
    calls = fields.get("tool_calls")
    if isinstance(calls, list):
        fields["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return fields


def _text(content: str | list[dict[str, Any]] | None) -> str | None:
    if not isinstance(content, list):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = str(part.get("type"))[:50]
            what = "must have a string as 'text'" if kind == "text" else "are not supported, text is"
            raise ApiError(400, f"content parts of type {kind!r} {what}", param="messages")
    return "\n".join(part["text"] for part in content)


def _with_object_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates want them; clients send JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise ApiError(400, "the arguments of a tool call are not JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def check_prompt(ids: list[int], wanted: int, model: ServedModel, name: str = "prompt") -> None:
    """Raise ApiError for a prompt that is empty, has unknown ids, or leaves no room for `wanted` tokens.

    `name`: the parameter that it was made of.
    """
    if not ids:
        raise ApiError(400, "the prompt has no tokens", param=name)
    context = model.max_model_len
    if len(ids) + wanted > context:
        too_much = f"and {wanted} to generate exceed" if len(ids) < context else "leave no room in"
        raise ApiError(
            400,
            f"{counted(len(ids), 'prompt token')} {too_much} the context of {counted(context, 'token')}",
            param="max_tokens" if len(ids) < context else name,
            code="context_length_exceeded",
        )
    bad = next((i for i in ids if not 0 <= i < model.vocab_size), None)
    if bad is not None:
        shown = bad if abs(bad) < 1 << 63 else "a huge number"
        raise ApiError(400, f"token id {shown} is outside the vocabulary, 0 to {model.vocab_size - 1}", param=name)


def read_options(
    body: Sampling, model: ServedModel, limits: ServerOptions, logprobs: int | None, name: str = "logprobs"
) -> SamplingParams:
    """The options of a request: what it says, else what the model says, else the defaults. max_tokens is not final.

    `name`: the parameter that says `logprobs`.
    """
    given = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if logprobs is not None:
        if not 0 <= logprobs <= limits.max_logprobs:
            raise ApiError(400, f"{name} is {_shown(logprobs)}, it must be from 0 to {limits.max_logprobs}", param=name)
        given["logprobs"] = logprobs
    try:
        return SamplingParams(**{**model.defaults, **given}).validate(model.vocab_size)
    except UsageError as error:
        wrong = next((n for n in (*given, *model.defaults) if n in error.message), None)
        raise usage_error(error, wrong) from None


def _logit_bias(values: dict[str, float]) -> dict[int, float]:
    if not all(_TOKEN_ID.fullmatch(key) for key in values):
        raise ApiError(400, "the keys of logit_bias must be token ids", param="logit_bias")
    return {int(key): value for key, value in values.items()}


def read_n(n: int | None, limits: ServerOptions) -> int:
    """How many answers to each prompt."""
    n = 1 if n is None else n
    if not 1 <= n <= limits.max_n:
        raise ApiError(400, f"n is {_shown(n)}, it must be from 1 to {limits.max_n}", param="n")
    return n


def read_stop(stop: str | list[str] | None, model: ServedModel, limits: ServerOptions) -> list[str]:
    """The stop strings."""
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(stops) > limits.max_stop:
        raise ApiError(400, f"{len(stops)} stop strings, the server takes {limits.max_stop}", param="stop")
    if any(_SURROGATE.search(each) for each in stops):
        raise ApiError(400, "a stop string has half a surrogate, which no text has", param="stop")
    if "" in stops:
        raise ApiError(400, "a stop string is empty", param="stop")
    if any(len(each) > MAX_STOP_CHARACTERS for each in stops):
        raise ApiError(400, f"a stop string is longer than {MAX_STOP_CHARACTERS} characters", param="stop")
    if stops and not model.tokenizer.has_text:
        raise ApiError(400, "this model has no tokenizer, so it cannot stop at strings", param="stop")
    return stops


def read_max_tokens(value: int | None, name: str, lowest: int, default: int) -> int:
    """How many tokens to generate."""
    if value is None:
        return default
    if value < lowest:
        raise ApiError(400, f"{name} is {_shown(value)}, it must be {lowest} or more", param=name)
    return min(value, 1 << 40)


def chat_max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """The value and name of whichever of the two parameters is given."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ", param="max_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


def with_choice_seed(request: Request, choice: int) -> Request:
    """The request with the seed of its n-th answer: the first one's is the one that was asked for."""
    import msgspec

    sampling = request.sampling.with_seed()
    assert sampling.seed is not None
    seed = (sampling.seed + choice) % (1 << 64)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=seed))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: int) -> str:
    """A number in a message, unless it fills the message."""
    return str(value) if abs(value) < 1 << 63 else "a huge number"
