"""A conversation with a model, over HTTP or with ranks of one's own: messages in, pieces of text out."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..shardplan.errors import MgtpError, UsageError
from ..shardplan.shard_set import ShardSet
from .generation_defaults import generation_defaults
from .launch.client import Generation, check_prompt, default_max_tokens, generate
from .launch.start import StartedGroup
from .sampling_params import SamplingParams
from .text.chat import ChatTemplate
from .text.tokenizer import Tokenizer

SECONDS = 600.0
"""How long a server may be silent."""


class Answers(Protocol):
    """Who answers a conversation."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The pieces of the answer to `messages`, as they come."""
        ...

    def check(self) -> None:
        """Raise MgtpError when no more answers can come; for who is busy with other things than asking."""
        ...


@dataclass
class Conversation:
    """What has been said, and who answers."""

    answers: Answers
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str) -> Generator[str]:
        """Say something; the pieces of the answer. What was said is forgotten when there is none.

        An answer that is not wanted to its end is remembered as far as it has come.
        """
        opening = [{"role": "system", "content": self.system}] if self.system is not None else []
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for piece in self.answers.answer([*opening, *asked]):
                pieces.append(piece)
                yield piece
        except (GeneratorExit, KeyboardInterrupt):
            if pieces:
                self._remember(asked, pieces)
            raise
        self._remember(asked, pieces)

    def _remember(self, asked: list[dict[str, str]], pieces: Sequence[str]) -> None:
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def clear(self) -> None:
        """Begin again."""
        self.messages = []


class RemoteAnswers:
    """Asks an OpenAI-compatible server; `options` are parameters of its requests."""

    def __init__(self, url: str, api_key: str | None, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key.strip()}"
        self._options = {name: value for name, value in options.items() if value is not None}
        with self._reading(), self._open("/v1/models", None) as response:
            models = msgspec.json.decode(response.read(), type=_Models).data
        if not models:
            raise MgtpError(f"{self._url} serves no model", "load one there")
        self.model = models[0].id

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """See Answers; raises MgtpError with the server's own words."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **self._options}
        with self._reading(), self._open("/v1/chat/completions", body) as response:
            for line in response:
                name, _, value = line.strip().partition(b":")
                if name != b"data":
                    continue  # an empty line, a comment
                if value.strip() == b"[DONE]":
                    return
                event = msgspec.json.decode(value, type=_Event)
                if event.error is not None:
                    raise MgtpError(f"{self._url}: {_message(value)}")
                for choice in event.choices:
                    yield choice.delta.content or ""
        raise self._broken("its end is missing")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Whatever else than an answer comes is one line."""
        try:
            yield
        except msgspec.MsgspecError as error:
            raise MgtpError(f"{self._url} is no OpenAI-compatible server: {error}", "check the address") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(str(error)) from None

    def _broken(self, reason: str) -> MgtpError:
        return MgtpError(f"{self._url}: the answer broke off: {reason}", "see the server's log, and ask again")

    def check(self) -> None:
        """See Answers. The next request finds out."""

    def _open(self, path: str, body: Any) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self._url}{path}", data, self._headers)
            return urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:
            raise MgtpError(f"{self._url}: {_message(error.read()) or error.reason}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise MgtpError(
                f"{self._url} does not answer: {reason}", "check the address, or start: mgtp serve DIR"
            ) from None


def _message(content: bytes) -> str:
    """What a document in OpenAI's form says of an error; empty when it is none."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[_Model]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    """An event of a stream: of a choice the text, or an error."""

    choices: list[_Choice] = []
    error: Any = None


def check_chat(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UsageError when the model whose small files are in `folder` has no chat template, or no tokenizer."""
    if not ChatTemplate.load(folder).available:
        raise UsageError(f"{folder} has no chat template", "use mgtp generate")
    _ = Tokenizer.load(folder, config).backend


class LocalAnswers:
    """Asks ranks of this very run; `options` are fields of SamplingParams."""

    def __init__(self, started: StartedGroup, shard_set: ShardSet, options: Mapping[str, Any]) -> None:
        self._started = started
        self._tokenizer = Tokenizer.load(shard_set.path, shard_set.config)
        self._template = ChatTemplate.load(shard_set.path)
        self.model = shard_set.path.name
        given = {name: value for name, value in options.items() if value is not None}
        self._has_limit = "max_tokens" in given
        defaults = generation_defaults(shard_set.path)
        self._sampling = SamplingParams(**{**defaults, **given}).validate(shard_set.model.vocab_size)
        self._vocab_size = shard_set.model.vocab_size

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """See Answers."""
        ids = self._tokenizer.encode(self._template.render(messages), add_special_tokens=False)
        context = self._started.ready[0].max_model_len
        sampling = self._sampling
        if not self._has_limit:
            sampling = msgspec.structs.replace(sampling, max_tokens=default_max_tokens(len(ids), context))
        check_prompt(ids, sampling.max_tokens, context, self._vocab_size)
        yield from generate(self._started, self._tokenizer, ids, sampling, result=Generation(ids), continues_text=False)

    def check(self) -> None:
        """See Answers."""
        self._started.group.check()
