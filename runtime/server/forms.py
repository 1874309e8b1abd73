"""Answers in OpenAI's two forms, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .generation import Piece
from .logprobs import chat_logprobs, completion_logprobs, prompt_entries
from .model import ServedModel
from .tools import ToolCall, ToolUse


@dataclass
class Form:
    """What both forms share. `prompts` are the ids of every prompt, each with `n` answers in a row."""

    model: ServedModel
    prompts: list[list[int]]
    n: int
    with_logprobs: bool
    with_token_ids: bool
    prefix: str = field(default="", init=False)
    whole_object: str = field(default="", init=False)
    chunk_object: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{secrets.token_hex(16)}"
        self.created = int(time.time())

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every document begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def usage(self, num_tokens: int) -> dict[str, Any]:
        """Token counts: a prompt counts once, however many answers it has."""
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": prompt + num_tokens}

    def whole(self, answers: Sequence[Piece], num_tokens: int) -> dict[str, Any]:
        """The complete answer."""
        choices = [self._with_ids(self.choice(answer), answer, True) for answer in answers]
        return {**self.head(self.whole_object), "choices": choices, "usage": self.usage(num_tokens)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of a stream."""
        return {**self.head(self.chunk_object), "choices": choices}

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        return []

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a piece."""
        return [self.chunk([self._with_ids(choice, piece, False)]) for choice in self.deltas(piece)]

    def choice(self, answer: Piece) -> dict[str, Any]:
        """One answer, whole."""
        raise NotImplementedError

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to its answer."""
        raise NotImplementedError

    def _with_ids(self, choice: dict[str, Any], piece: Piece, whole: bool) -> dict[str, Any]:
        if self.with_token_ids:
            choice["token_ids"] = piece.token_ids
            if whole:
                choice["prompt_token_ids"] = self.prompts[piece.index // self.n]
        return choice


@dataclass
class CompletionForm(Form):
    """/v1/completions. `echoes` are the prompts' texts where they are part of the answer.

    With `with_scores` a stream's answers begin with the prompt's log-probabilities, before which nothing can be said.
    """

    echoes: list[str] | None = None
    with_scores: bool = False

    def __post_init__(self) -> None:
        self.prefix, self.whole_object, self.chunk_object = "cmpl-", "text_completion", "text_completion"
        super().__post_init__()

    def choice(self, answer: Piece) -> dict[str, Any]:
        echo = self._echo(answer.index)
        return self._choice(answer, echo + answer.text, len(echo))

    def opening(self) -> list[dict[str, Any]]:
        if self.echoes is None or self.with_scores:
            return []
        count = len(self.prompts) * self.n
        return [self.chunk([self._choice(Piece(i), self._echo(i), 0)]) for i in range(count)]

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        echo = self._echo(piece.index)
        return [self._choice(piece, (echo if piece.prompt is not None else "") + piece.text, len(echo))]

    def _echo(self, index: int) -> str:
        return "" if self.echoes is None else self.echoes[index // self.n]

    def _choice(self, piece: Piece, text: str, offset: int) -> dict[str, Any]:
        """`offset` is where the generated text begins in the answer, in characters."""
        tokenizer = self.model.tokenizer
        entries = [replace(entry, offset=offset + entry.offset) for entry in piece.entries]
        if piece.prompt is not None:
            entries = prompt_entries(tokenizer, self.prompts[piece.index // self.n], piece.prompt) + entries
        logprobs = completion_logprobs(tokenizer, entries) if self.with_logprobs else None
        return {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}


@dataclass
class ChatForm(Form):
    """/v1/chat/completions."""

    tools: ToolUse = field(default_factory=ToolUse)

    def __post_init__(self) -> None:
        self.prefix, self.whole_object = "chatcmpl-", "chat.completion"
        self.chunk_object = "chat.completion.chunk"
        self._readers = [self.tools.reader() for _ in range(self.n)]
        super().__post_init__()

    def choice(self, answer: Piece) -> dict[str, Any]:
        text, calls = self._read(answer)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.document() for call in calls]
        return self._choice(answer, "message", message)

    def opening(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [self.chunk([self._choice(Piece(i), "delta", first)]) for i in range(self.n)]

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        text, calls = self._read(piece)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": call.index, **call.document()} for call in calls]
        if not (delta or piece.entries or piece.token_ids or piece.finish_reason):
            return []  # what may be a call is held back until it is whole
        return [self._choice(piece, "delta", delta)]

    def _read(self, piece: Piece) -> tuple[str, list[ToolCall]]:
        """The text and the calls of a piece; an answer that ends with a call has ended because of it."""
        reader = self._readers[piece.index]
        text, calls = reader.push(piece.text)
        if piece.finish_reason is not None:
            rest, more = reader.finish()
            text, calls = text + rest, calls + more
            if reader.num_calls and piece.finish_reason == "stop":
                piece.finish_reason = "tool_calls"
        return text, calls

    def _choice(self, piece: Piece, key: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(self.model.tokenizer, piece.entries) if self.with_logprobs else None
        return {"index": piece.index, key: content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
