"""Running a batch: as many requests at once as the engine takes, each result written when it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...shardplan.errors import UsageError
from ..launch.client import token_logprobs
from ..launch.start import StartedGroup
from ..messages import Abort, RequestFailed, TokenOutput, Tokens
from ..server.bodies import unanswered
from ..server.generation import Piece, merge
from .request_file import Line, RequestFile, Task
from .result_file import InOrder, ResultFile, openai_result, plain_result

AHEAD = 2
"""Sequences under way for every one that can run: the next must be there when one ends."""


class Summary(msgspec.Struct):
    """What a run did. `requests` are all of the file's, `skipped` those that had a result before; `failed` counts all
    results that are errors. Tokens and seconds are this run's."""

    output: str
    requests: int
    skipped: int
    failed: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return self.completion_tokens / max(self.seconds, 1e-9)


@dataclass
class _Job:
    """A request under way."""

    line: Line
    task: Task
    unfinished: set[str]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(answer.num_tokens for answer in self.task.asked.answers)


class OfflineRun:
    """One run over a file's requests. `max_num_seqs` is what the engine runs at once."""

    def __init__(
        self, started: StartedGroup, requests: RequestFile, results: ResultFile, *, max_num_seqs: int, ordered: bool
    ) -> None:
        self._group, self._requests, self._results = started.group, requests, results
        self._room = AHEAD * max_num_seqs
        self._todo = [line for line in requests.lines if line.key not in results.done]
        self._order = InOrder([line.key for line in self._todo]) if ordered else None
        self._jobs: dict[str, tuple[_Job, int]] = {}
        skipped = len(requests.lines) - len(self._todo)
        self.summary = Summary(str(results.path), len(requests.lines), skipped, results.num_failed)
        check_context(requests.lines, started.ready[0].max_model_len)
        requests.model.context = started.ready[0].max_model_len

    def run(self, note: Callable[[int, int], None]) -> Summary:
        """Answer what has no result yet; `note` is told after every step: (results so far, tokens of this run)."""
        begin, done = time.monotonic(), self.summary.skipped
        lines = iter(self._todo)
        for finished in self._steps(lines):
            done += finished
            self.summary.seconds = time.monotonic() - begin
            self.summary.failed = self._results.num_failed
            note(done, self.summary.completion_tokens)
        return self.summary

    def _steps(self, lines: Iterator[Line]) -> Iterator[int]:
        """After every message from the ranks: how many requests have ended with it."""
        while True:
            while len(self._jobs) < self._room and (line := next(lines, None)) is not None:
                yield self._submit(line)
            if not self._jobs:
                return
            message = self._group.receive_step()
            if isinstance(message, Tokens):
                yield sum(self._take(output) for output in message.outputs)
            elif isinstance(message, RequestFailed) and message.id in self._jobs:
                yield self._fail(message)

    def _submit(self, line: Line) -> int:
        """Send a request to the leader; 1 when there is nothing to generate, so that it has ended."""
        task = self._requests.task(line)
        answers = task.asked.answers
        job = _Job(line, task, {answer.request.id for answer in answers})
        self.summary.prompt_tokens += sum(map(len, task.asked.form.prompts))
        for index, answer in enumerate(answers):
            self._jobs[answer.request.id] = job, index
            self._group.send(answer.request)
        if not answers:
            self._write(job, None)
        return not answers

    def _take(self, output: TokenOutput) -> int:
        """A token; 1 when it was the last of its request."""
        if output.id not in self._jobs:
            return 0  # a stop string has ended it
        job, index = self._jobs[output.id]
        piece = job.task.asked.answers[index].take(output)
        job.pieces.append(piece)
        self.summary.completion_tokens += 1
        if piece.finish_reason is None:
            return 0
        if output.finish_reason is None:
            self._group.send(Abort(output.id))
        del self._jobs[output.id]
        job.unfinished.discard(output.id)
        if job.unfinished:
            return 0
        self._write(job, None)
        return 1

    def _fail(self, message: RequestFailed) -> int:
        job, _ = self._jobs[message.id]
        for request_id in job.unfinished:
            self._group.send(Abort(request_id))
            del self._jobs[request_id]
        self._write(job, message.message)
        return 1

    def _write(self, job: _Job, error: str | None) -> None:
        result = (_result(job, error), error is not None)
        for document, failed in [result] if self._order is None else self._order.push(job.line.key, result):
            self._results.write(document, failed=failed)


def check_context(lines: list[Line], context: int) -> None:
    """Raise UsageError for the first request that needs more context than there is memory for."""
    for line in lines:
        if line.needed > context:
            raise UsageError(
                f"line {line.number} needs a context of {line.needed} tokens, there is memory for {context}",
                "shorten it, lower its max_tokens, or use more ranks",
            )


def _result(job: _Job, error: str | None) -> dict[str, Any]:
    task, digest = job.task, job.line.digest
    if error is not None:
        if task.is_openai:
            return openai_result(task.id, digest, None, error)
        return plain_result(task.id, digest, {"error": {"message": error}})
    form = task.asked.form
    answers = merge(job.pieces, len(task.asked.answers)) if task.asked.answers else unanswered(form)
    if task.is_openai:
        return openai_result(task.id, digest, form.whole(answers, job.num_tokens), None)
    (answer,) = answers
    fields: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": form.usage(job.num_tokens),
    }
    if form.with_logprobs:
        pairs = [(entry.token_id, entry.logprobs) for entry in answer.entries if entry.logprobs is not None]
        fields["logprobs"] = token_logprobs(form.model.tokenizer, pairs)
    return plain_result(task.id, digest, fields)
