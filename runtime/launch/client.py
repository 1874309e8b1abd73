"""Requests from the front's side: checks them, sends them, and turns tokens back into text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...shardplan.errors import MgtpError, UsageError
from ...shardplan.values import counted
from ..messages import Abort, Request, RequestFailed, TokenLogprobs, TokenOutput, Tokens
from ..sampling_params import SamplingParams
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .start import StartedGroup


@dataclass
class Generation:
    """One finished or running generation. `finish_reason` is 'stop' or 'length'; `started` and the like are seconds."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first."""
        if self.first_token_seconds is None or len(self.token_ids) < 2:
            return None
        return (len(self.token_ids) - 1) / max(self.seconds - self.first_token_seconds, 1e-9)


def default_max_tokens(prompt_length: int, max_model_len: int) -> int:
    """What is left of the context, at most 512."""
    return max(1, min(512, max_model_len - prompt_length))


def check_prompt(ids: Sequence[int], max_tokens: int, max_model_len: int, vocab_size: int) -> None:
    """Raise UsageError for a prompt that is empty, holds unknown ids, or leaves no room for `max_tokens`."""
    if not ids:
        raise UsageError("the prompt has no tokens", "give a prompt that is not empty")
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise UsageError(f"prompt token id {bad} is outside the vocabulary", f"valid: 0 to {vocab_size - 1}")
    if len(ids) + max_tokens > max_model_len:
        prompt, context = counted(len(ids), "token"), counted(max_model_len, "token")
        if len(ids) >= max_model_len:
            raise UsageError(f"prompt of {prompt} leaves no room in the context of {context}", "shorten the prompt")
        raise UsageError(
            f"prompt of {prompt} and --max-tokens {max_tokens} exceed the context of {context}",
            f"shorten the prompt, or use --max-tokens {max_model_len - len(ids)} or less",
        )


def generate(
    started: StartedGroup,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    sampling: SamplingParams,
    stop: Sequence[str] = (),
    *,
    result: Generation | None = None,
    continues_text: bool = True,
) -> Generator[str]:
    """Run one request and yield its text in pieces of whole characters; `result` collects everything else.

    `continues_text`: the answer goes on in the prompt's text, so a space it begins with counts. Close it before the ranks
    are stopped: they are told what is not wanted to its end.

    Raises MgtpError when the request fails and RankError when a rank does.
    """
    result = result if result is not None else Generation(prompt_ids)
    stream = TextStream(tokenizer, stop, continues_text=continues_text) if tokenizer.has_text else None
    begin = time.monotonic()
    request = Request(secrets.token_hex(8), prompt_ids, sampling.with_seed(), sorted(tokenizer.eos_ids))
    started.group.send(request)
    try:
        for output in _outputs(started, request.id):
            now = time.monotonic() - begin
            result.first_token_seconds = result.first_token_seconds or now
            result.seconds = now
            result.token_ids.append(output.token_id)
            result.finish_reason = output.finish_reason
            if output.logprobs is not None:
                result.logprobs.append(output.logprobs)
            if stream is not None and not _ends_text(output.token_id, output.finish_reason, request):
                yield stream.push(output.token_id)
            if stream is not None and stream.stopped is not None:
                result.finish_reason = "stop"
                started.group.send(Abort(request.id))
            if result.finish_reason is not None:
                break
    except (GeneratorExit, KeyboardInterrupt):  # nobody wants the rest
        started.group.send(Abort(request.id))
        raise
    if stream is not None:
        yield stream.finish()
        result.text = stream.text


def _outputs(started: StartedGroup, request_id: str) -> Iterator[TokenOutput]:
    """The tokens of a request as they come; those of one before it that was given up may still be on their way."""
    while True:
        message = started.group.receive_step()
        if isinstance(message, RequestFailed) and message.id == request_id:
            raise MgtpError(message.message, "check the set with mgtp verify, or shard with another --dtype")
        if isinstance(message, Tokens):
            yield from (output for output in message.outputs if output.id == request_id)


def token_logprobs(tokenizer: Tokenizer, tokens: Iterable[tuple[int, TokenLogprobs]]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities as `mgtp generate` writes them: token_id, token, logprob, top."""
    return [
        {
            "token_id": token_id,
            "token": tokenizer.token_name(token_id) if tokenizer.has_text else None,
            "logprob": entry.chosen,
            "top": [{"token_id": i, "logprob": p} for i, p in zip(entry.top_ids, entry.top, strict=True)],
        }
        for token_id, entry in tokens
    ]


def _ends_text(token_id: int, finish_reason: str | None, request: Request) -> bool:
    """Whether a token only ends the text and is no part of it."""
    return finish_reason == "stop" and (token_id in request.eos_ids or token_id in request.sampling.stop_token_ids)
