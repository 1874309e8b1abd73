"""From tokens to pieces of text with what belongs to them; streams and whole answers are made of the same pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from ..messages import Request, TokenLogprobs, TokenOutput
from ..text.stream import TextStream
from .engine_client import EngineClient
from .errors import ApiError
from .metrics import ModelMetrics
from .model import ServedModel


@dataclass(frozen=True)
class TokenEntry:
    """A token of the text with its log-probabilities; `offset` is where its text begins, in characters.

    The first token of a prompt has no probability: it follows nothing.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass
class Piece:
    """What is new of one answer. Joined, the texts are the whole answer. `prompt` is what TokenOutput says of it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    prompt: list[TokenLogprobs] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say yet."""
        return not (self.text or self.entries or self.token_ids or self.finish_reason) and self.prompt is None


class Answer:
    """One answer on its way: `take` a token, get a piece. With `is_empty`, only what is said of the prompt counts."""

    def __init__(
        self,
        index: int,
        request: Request,
        model: ServedModel,
        stop: Sequence[str],
        continues: bool,
        is_empty: bool = False,
    ) -> None:
        self.index, self.request, self._is_empty = index, request, is_empty
        self.num_tokens = 0
        self.last_seconds = 0.0
        self._stream = TextStream(model.tokenizer, stop, continues_text=continues) if model.tokenizer.has_text else None
        self._given = 0
        self._entries: list[TokenEntry] = []
        self._ids: list[int] = []

    def take(self, output: TokenOutput) -> Piece:
        """A token that has come; the piece may be empty while text is held back."""
        if self._is_empty:
            return Piece(self.index, finish_reason="length", prompt=output.prompt)
        self.num_tokens += 1
        self._ids.append(output.token_id)
        piece = Piece(self.index, finish_reason=output.finish_reason, prompt=output.prompt)
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


class Generation:
    """The answers to one HTTP request. Iterate over their pieces as they come; `close` frees what is unfinished."""

    def __init__(self, client: EngineClient, answers: Sequence[Answer], seconds: float, metrics: ModelMetrics) -> None:
        """Submits at once: raises ApiError when there is no room. `seconds` is the time limit."""
        self._answers, self._metrics = answers, metrics
        self._begin = time.monotonic()
        self._reasons: list[str | None] = [None] * len(answers)
        self._ticket = client.submit([answer.request for answer in answers])
        late = ApiError(504, f"the request took longer than {seconds:g} s", code="timeout")
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ticket.fail, late)
        self._is_closed = False

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, those that end an answer included."""
        return sum(answer.num_tokens for answer in self._answers)

    @property
    def reasons(self) -> list[str]:
        """How the answers have ended."""
        return [reason or "aborted" for reason in self._reasons]

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, of all answers, the last one of each with its finish_reason; at most one of each at once.

        Raises ApiError when the request fails.
        """
        async for arrived in self._ticket:
            pieces: dict[int, list[Piece]] = {}
            for index, output in arrived:
                if self._reasons[index] is None:  # else a stop string has ended it; its last tokens were on their way
                    pieces.setdefault(index, []).append(self._take(index, output))
            said = [piece for parts in pieces.values() if not (piece := join(parts)).is_empty]
            if said:
                yield said

    def _take(self, index: int, output: TokenOutput) -> Piece:
        answer = self._answers[index]
        self._observe(answer)
        piece = answer.take(output)
        if piece.finish_reason is not None:
            self._reasons[index] = piece.finish_reason
            if output.finish_reason is None:
                self._ticket.finish(index)
        return piece

    def close(self) -> None:
        """End what is unfinished and count what there was; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        self._ticket.close()
        self._metrics.request_seconds.observe(time.monotonic() - self._begin)
        for reason in self.reasons:
            self._metrics.note_finished(reason)
        self._metrics.generated_tokens.inc(self.num_tokens)

    def _observe(self, answer: Answer) -> None:
        now = time.monotonic()
        if answer.num_tokens == 0:
            self._metrics.first_token.observe(now - self._begin)
        else:
            self._metrics.between_tokens.observe(now - answer.last_seconds)
        answer.last_seconds = now


def join(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one answer that follow each other, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        pieces[0].index,
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [entry for piece in pieces for entry in piece.entries],
        next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason is not None), None),
        next((piece.prompt for piece in pieces if piece.prompt is not None), None),
    )


def merge(pieces: Iterable[Piece], count: int) -> list[Piece]:
    """The pieces of `count` answers, joined to one each."""
    parts = [[Piece(index)] for index in range(count)]
    for piece in pieces:
        parts[piece.index].append(piece)
    return [join(each) for each in parts]
