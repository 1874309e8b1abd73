"""The requests of a batch: a JSON object a line, in OpenAI's batch form or a plainer one.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "temperature": 0}}
{"id": "b", "prompt": "Once upon a time", "max_tokens": 20}

Every line is read twice: first all of them, so that a wrong one is refused before anything is started, then each when its
turn comes. What is kept meanwhile is small, however long the prompts are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from pydantic import ValidationError

from ...shardplan.errors import MgtpError, UsageError
from ..server.bodies import Asked, read_chat, read_completion
from ..server.errors import ApiError, invalid, unknown_model
from ..server.model import ServedModel
from ..server.options import ServerOptions
from ..server.protocol import ChatRequest, CompletionRequest, without_nulls

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

DEFAULT_TOKENS = 512
"""Most tokens of an answer where neither its line nor the command says how many."""

_PLAIN_OPTIONS = {
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "response_format"),
}
_SOURCES = ("prompt", "prompt_ids", "messages")
_PLAIN_FIELDS = _PLAIN_OPTIONS | {"id", *_SOURCES}
_OPENAI_FIELDS = {"custom_id", "method", "url", "body"}


class OfflineModel(ServedModel):
    """The model as requests see it, with the context that is known before, or without, any ranks."""

    context: int

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.context

    def check_name(self, name: str | None) -> None:
        """Raise ApiError when a line is meant for another model."""
        if name not in (None, self.name):
            raise unknown_model(name, [self.name])


@dataclass(frozen=True, slots=True)
class Line:
    """A request that has been checked. `needed` tokens of context at least, `longest` at most; `digest` names what is
    asked of whom, so that an answer can be told from one to something else."""

    number: int
    offset: int
    key: str
    digest: str
    needed: int
    longest: int


@dataclass(frozen=True)
class Task:
    """A request, ready to run. `id` is what its line calls it, `is_openai` the form of line and result; `has_limit`:
    somebody has said how many tokens it may have."""

    id: Any
    is_openai: bool
    has_limit: bool
    asked: Asked


class RequestFile:
    """The requests of `path`. Use as a context manager. `defaults` are options of lines that do not say otherwise."""

    def __init__(self, path: Path, model: OfflineModel, defaults: Mapping[str, Any]) -> None:
        self.path, self.model, self._defaults = path, model, dict(defaults)
        self._limits = ServerOptions()
        plan = model.shard_set.plan
        self._base = json.dumps([plan.fingerprint, plan.dtype, self._defaults], sort_keys=True).encode()
        self._loop = asyncio.Runner()
        try:
            if not path.is_file():
                raise UsageError(f"--prompts {path} is not a file", "give a file with a JSON object on every line")
            self._file = path.open("rb")
        except OSError as error:
            raise UsageError(f"--prompts {path}: {error.strerror}", "check the path") from None
        self.lines = list(self._scan())
        if not self.lines:
            raise UsageError(f"--prompts {path} has no requests", "give a file with a JSON object on every line")

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._loop.close()

    def task(self, line: Line) -> Task:
        """The request of a line; raises UsageError when the file has changed meanwhile."""
        self._file.seek(line.offset)
        raw = self._file.readline()
        if self._digest(raw) != line.digest:
            raise UsageError(f"{self.path} line {line.number} has changed", "run the command again")
        return self._read(raw, line.number)

    def _scan(self) -> Iterator[Line]:
        """All lines, checked; empty ones are passed over."""
        first: dict[str, int] = {}
        offset = 0
        for number, raw in enumerate(self._file, 1):
            if raw.strip():
                line = self._check(raw, number, offset)
                if line.key in first:
                    raise self._wrong(number, f"the id {line.key!r} is that of line {first[line.key]} too")
                first[line.key] = number
                yield line
            offset += len(raw)

    def _check(self, raw: bytes, number: int, offset: int) -> Line:
        task = self._read(raw, number)
        requests = [answer.request for answer in task.asked.answers]
        longest = max((len(r.prompt_ids) + r.sampling.max_tokens for r in requests), default=1)
        prompt = max(map(len, task.asked.form.prompts))
        return Line(number, offset, str(task.id), self._digest(raw), longest if task.has_limit else prompt + 1, longest)

    def _digest(self, raw: bytes) -> str:
        return hashlib.blake2b(self._base + raw.strip(), digest_size=16).hexdigest()

    def _read(self, raw: bytes, number: int) -> Task:
        """The request that a line holds; raises UsageError that names the line."""
        try:
            document = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
            if not isinstance(document, dict):
                raise ApiError(400, "it is no JSON object")
            return self._loop.run(self._understand(without_nulls(document), number))
        except msgspec.DecodeError as error:
            raise self._wrong(number, f"it is no JSON: {error}") from None
        except ValidationError as error:
            raise self._wrong(number, invalid(error.errors()[0]).message) from None
        except (ApiError, MgtpError) as error:
            raise self._wrong(number, error.message) from None

    def _wrong(self, number: int, what: str) -> UsageError:
        return UsageError(f"{self.path} line {number}: {what}", "correct the line; nothing has been started")

    async def _understand(self, document: dict[str, Any], number: int) -> Task:
        is_openai = "body" in document or "custom_id" in document
        name, url, body = _openai(document) if is_openai else _plain(document, number)
        body = {**self._defaults_for(url, body), **body}
        has_limit = any(body.get(key) is not None for key in ("max_tokens", "max_completion_tokens"))
        if url == CHAT:
            chat = ChatRequest.model_validate(body)
            self.model.check_name(chat.model)
            asked = await read_chat(self.model, self._limits, chat, DEFAULT_TOKENS)
        else:
            completion = CompletionRequest.model_validate(body)
            self.model.check_name(completion.model)
            asked = await read_completion(self.model, self._limits, completion, DEFAULT_TOKENS)
        return Task(name, is_openai, has_limit, asked)

    def _defaults_for(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults as `body` would spell them."""
        defaults = dict(self._defaults)
        if "max_completion_tokens" in body:
            defaults.pop("max_tokens", None)
        if url == CHAT and "logprobs" in defaults:
            defaults |= {"logprobs": True, "top_logprobs": defaults["logprobs"]}
        if url == CHAT and "logprobs" in body:
            defaults.pop("top_logprobs", None)
        return defaults


def _openai(document: Mapping[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    """(id, url, body) of a line in OpenAI's form."""
    _refuse_others(document, _OPENAI_FIELDS)
    url, body = document.get("url"), document.get("body")
    if url not in (CHAT, COMPLETION):
        raise ApiError(400, f"url is {str(url)[:50]!r}, it must be {CHAT} or {COMPLETION}")
    if document.get("method", "POST") != "POST":
        raise ApiError(400, f"method is {str(document['method'])[:50]!r}, it must be POST")
    if not isinstance(body, dict):
        raise ApiError(400, "body must be an object")
    if body.get("stream"):
        raise ApiError(400, "stream: a batch has nobody to stream to")
    return _id(document, "custom_id"), url, without_nulls(body)  # null hides no default


def _plain(document: Mapping[str, Any], number: int) -> tuple[Any, str, dict[str, Any]]:
    """(id, url, body) of a line in the plain form; without an id, the line's number is one."""
    _refuse_others(document, _PLAIN_FIELDS)
    sources = [name for name in _SOURCES if name in document]
    if len(sources) != 1:
        found = " and ".join(sources) or "none of them"
        raise ApiError(400, f"a line has one of {', '.join(_SOURCES)}; this one has {found}")
    body = {name: value for name, value in document.items() if name not in ("id", "prompt_ids")}
    if sources == ["messages"]:
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    else:
        body["prompt"] = _one_prompt(document[sources[0]], sources[0])
    return _id(document, "id") if "id" in document else number, COMPLETION if "prompt" in body else CHAT, body


def _one_prompt(prompt: Any, name: str) -> Any:
    """A text, or the ids of one: a list of prompts would be several answers to one line."""
    if name == "prompt" and not isinstance(prompt, str):
        raise ApiError(400, "prompt must be text; ids are prompt_ids, and every prompt has its own line")
    if name == "prompt_ids" and not (isinstance(prompt, list) and all(type(i) is int for i in prompt)):
        raise ApiError(400, "prompt_ids must be a list of token ids")
    return prompt


def _id(document: Mapping[str, Any], name: str) -> Any:
    value = document.get(name)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ApiError(400, f"{name} must be text or a whole number, and not empty")
    return value


def _refuse_others(document: Mapping[str, Any], known: Set[str]) -> None:
    other = next((name for name in document if name not in known), None)
    if other is not None:
        raise ApiError(400, f"unknown field {other[:100]!r}")
