"""From tokens to pieces of text with what belongs to them; streams and whole answers are made of the same pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from ..messages import Request, TokenLogprobs, TokenOutput
from ..text.stream import TextStream
from .engine_client import EngineClient
from .errors import ApiError
from .metrics import Metrics
from .model import ServedModel


@dataclass(frozen=True)
class TokenEntry:
    """A token of the text with its log-probabilities; `offset` is where its text begins, in characters."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass
class Piece:
    """What is new of one answer. Joined, the texts are the whole answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """One answer on its way: `take` a token, get a piece."""

    def __init__(self, index: int, request: Request, model: ServedModel, stop: Sequence[str], continues: bool) -> None:
        self.index, self.request = index, request
        self.num_tokens = 0
        self.last_seconds = 0.0
        self._stream = TextStream(model.tokenizer, stop, continues_text=continues) if model.tokenizer.has_text else None
        self._given = 0
        self._entries: list[TokenEntry] = []
        self._ids: list[int] = []

    def take(self, output: TokenOutput) -> Piece:
        """A token that has come; the piece may be empty while text is held back."""
        self.num_tokens += 1
        self._ids.append(output.token_id)
        piece = Piece(self.index, finish_reason=output.finish_reason)
        if not self._only_ends(output):
            if output.logprobs is not None:
                offset = self._stream.decoded_length if self._stream is not None else 0
                self._entries.append(TokenEntry(output.token_id, offset, output.logprobs))
            if self._stream is not None:
                piece.text = self._stream.push(output.token_id)
        if self._stream is not None:
            if output.finish_reason is not None:
                piece.text += self._stream.finish()
            if self._stream.stopped is not None:
                piece.finish_reason = "stop"
        self._given += len(piece.text)
        self._hand_over(piece)
        return piece

    def _only_ends(self, output: TokenOutput) -> bool:
        """Whether a token only ends the text and is no part of it."""
        request = self.request
        ends = output.token_id in request.eos_ids or output.token_id in request.sampling.stop_token_ids
        return output.finish_reason == "stop" and ends

    def _hand_over(self, piece: Piece) -> None:
        """Give a piece the tokens whose text has begun, and at the end those that have none."""
        if not (piece.text or piece.finish_reason or self._stream is None):
            return
        stopped = self._stream is not None and self._stream.stopped is not None
        everything = self._stream is None or (piece.finish_reason is not None and not stopped)
        certain = [e for e in self._entries if everything or e.offset < self._given]
        piece.entries, self._entries = certain, self._entries[len(certain) :]
        piece.token_ids, self._ids = self._ids, []


async def generate(
    client: EngineClient, answers: Sequence[Answer], seconds: float, metrics: Metrics
) -> AsyncIterator[Piece]:
    """The pieces of all answers as they come, the last one of each with its finish_reason. Submits before it is iterated.

    Raises ApiError when the request fails or takes longer than `seconds`; closing it frees what is unfinished.
    """
    ticket = client.submit([answer.request for answer in answers])
    late = ApiError(504, f"the request took longer than {seconds:g} s", code="timeout")
    timer = asyncio.get_running_loop().call_later(seconds, ticket.fail, late)
    return _pieces(ticket, timer, answers, metrics)


async def _pieces(ticket, timer: asyncio.TimerHandle, answers: Sequence[Answer], metrics: Metrics):  # noqa: ANN001, ANN202
    begin = time.monotonic()
    reasons = ["aborted"] * len(answers)
    try:
        async for index, output in ticket:
            answer = answers[index]
            if reasons[index] != "aborted":
                continue  # a stop string has ended it; its last tokens were on their way
            _observe(answer, begin, metrics)
            piece = answer.take(output)
            if piece.finish_reason is not None:
                reasons[index] = piece.finish_reason
                if output.finish_reason is None:
                    ticket.finish(index)
            if piece.text or piece.entries or piece.token_ids or piece.finish_reason:
                yield piece
    finally:
        timer.cancel()
        ticket.close()
        metrics.request_seconds.observe(time.monotonic() - begin)
        for reason, answer in zip(reasons, answers, strict=True):
            metrics.finished.labels(reason).inc()
            metrics.generated_tokens.inc(answer.num_tokens)


def _observe(answer: Answer, begin: float, metrics: Metrics) -> None:
    now = time.monotonic()
    if answer.num_tokens == 0:
        metrics.first_token.observe(now - begin)
    else:
        metrics.between_tokens.observe(now - answer.last_seconds)
    answer.last_seconds = now
