"""The leader's loop body: schedule, run, sample, hand out tokens.

On a GPU a step is launched before the tokens of the one before have been read: the device goes from step to step
without waiting for Python. A sequence that turns out to have ended was then given one step too many, whose token is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..shardplan.errors import UsageError
from .grammar import Grammars
from .landing import Landing
from .messages import Request, RequestFailed, Step, TokenLogprobs, TokenOutput
from .penalties import TokenHistory, record
from .prompt_scores import PromptScores
from .runner import Runner
from .sampling import Sampled, Sampler, top_logprobs
from .scheduler import Scheduled, Scheduler
from .scheduler import Sequence as RunningSequence


@dataclass(frozen=True)
class Flight:
    """A step that was launched. `due` are the parts that sample, `places` where their tokens go in the output.

    `landing` brings ids, failures and, when any request asked, log-probabilities.
    """

    due: list[Scheduled]
    places: list[int]
    landing: Landing


class Engine:
    """Runs requests on the leader's runner; `send_step` tells the followers, before the step begins.

    `overlap`: launch a step before reading the tokens of the one before.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        max_model_len: int,
        send_step: Callable[[Step], None],
        tokenizer_json: bytes | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        self.runner, self.scheduler, self.max_model_len = runner, scheduler, max_model_len
        self.send_step = send_step
        self.sampler = Sampler()
        self.histories: dict[str, TokenHistory] = {}
        self.scores = PromptScores()
        self.grammars = Grammars(tokenizer_json, runner.config.vocab_size)
        self._refused: list[RequestFailed] = []
        self.overlap = overlap
        self._flight: Flight | None = None

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return self.scheduler.has_work or self._flight is not None or bool(self._refused)

    def add(self, request: Request) -> None:
        """Queue a request that has been validated by the front; what is wrong nevertheless, the next step reports."""
        try:
            self.grammars.add(request)
        except UsageError as error:
            self._refused.append(RequestFailed(request.id, error.message))
            return
        if request.sampling.needs_history:
            vocab, device = self.runner.config.vocab_size, self.runner.place.device
            self.histories[request.id] = TokenHistory(request.prompt_ids, [], vocab, device)
        self.scores.expect(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self.scheduler.abort(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self.histories.pop(request_id, None)
        self.grammars.drop(request_id)
        self.scores.pop(request_id)

    def step(self) -> tuple[list[TokenOutput], list[RequestFailed]]:
        """Launch the next step, if there is one: the tokens that have come, and the requests that cannot go on.

        They are those of the step before when steps overlap, and of the same step when not.
        """
        refused, self._refused = self._refused, []
        # A grammar decides on the next token by the last one.
        before, self._flight = self._flight, None
        outputs, failures = self._land(before) if self.grammars.any else ([], [])
        flight = self._launch()
        if not self.grammars.any:
            outputs, failures = self._land(before)
        if self.overlap:
            self._flight = flight
        else:
            outputs, failures = self._land(flight)
        return outputs, refused + failures

    def _launch(self) -> Flight | None:
        """One forward pass over what is due; None when nothing is sampled."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return None
        due = [s for s in scheduled if s.step.sample]
        step = Step([s.step for s in scheduled], greedy=not self.grammars.any and all(map(_is_greedy, due)))
        self.send_step(step)
        logits = self.scores.take(self.runner.forward(step), scheduled)
        if not due:
            return None
        sampled = self.runner.likeliest if step.greedy else None
        if sampled is None:
            sampled = self._sample(logits, step, due)
        places = [s.sequence.expect_token() for s in due]
        for s, place in zip(due, places, strict=True):
            s.sequence.is_full = self._fills(s.sequence, place)
        return Flight(due, places, Landing([sampled.ids, sampled.failed, *_logprobs(logits, sampled.ids, due)]))

    def _sample(self, logits: torch.Tensor, step: Step, due: list[Scheduled]) -> Sampled:
        """Choose the next tokens, each request's own way, and tell them to every rank."""
        histories = [self.histories.get(s.sequence.request.id) for s in due]
        positions = [s.step.start + s.step.num_tokens for s in due]
        masked = self.grammars.mask(logits, [s.sequence.request.id for s in due])
        sampled = self.sampler.sample(masked, [s.sequence.request.sampling for s in due], positions, histories)
        self.runner.settle(step, sampled.ids)
        record(histories, sampled.ids)
        return sampled

    def _land(self, flight: Flight | None) -> tuple[list[TokenOutput], list[RequestFailed]]:
        """Read a step's tokens and hand them out, but for requests that have ended meanwhile."""
        if flight is None:
            return [], []
        ids, failed, *logprobs = (t.tolist() for t in flight.landing.get())
        # All of them before any sequence ends: what ends makes the blocks of others findable by their tokens.
        for s, place, token_id in zip(flight.due, flight.places, ids, strict=True):
            s.sequence.output_ids[place] = token_id
        outputs, failures = [], []
        for row, (s, place) in enumerate(zip(flight.due, flight.places, strict=True)):
            if s.sequence.is_finished:
                continue
            if failed[row]:
                failures.append(self._fail(s.sequence))
            else:
                outputs.append(self._deliver(s.sequence, place, _row_logprobs(s, row, logprobs)))
        return outputs, failures

    def _deliver(self, sequence: RunningSequence, place: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """Hand out the token at `place`, and end the sequence when it is the last."""
        token_id = sequence.output_ids[place]
        prompt = self.scores.pop(sequence.request.id)
        reason = self._finish_reason(sequence, place)
        if reason is not None:
            self._end(sequence)
        return TokenOutput(sequence.request.id, token_id, reason, logprobs, prompt)

    def _fail(self, sequence: RunningSequence) -> RequestFailed:
        self._end(sequence)
        return RequestFailed(
            sequence.request.id,
            f"the logits after {sequence.num_tokens} tokens are not finite: the weights may overflow in this dtype",
        )

    def _end(self, sequence: RunningSequence) -> None:
        self.scheduler.finish(sequence)
        self._forget(sequence.request.id)

    def _fills(self, sequence: RunningSequence, place: int) -> bool:
        """Whether the token at `place` is the last that there is room for."""
        count = place + 1
        longest = self.max_model_len - len(sequence.request.prompt_ids)
        return count >= min(sequence.request.sampling.max_tokens, longest)

    def _finish_reason(self, sequence: RunningSequence, place: int) -> str | None:
        sampling, token_id = sequence.request.sampling, sequence.output_ids[place]
        if self.grammars.accept(sequence.request.id, token_id) or token_id in sampling.stop_token_ids:
            return "stop"
        if not sampling.ignore_eos and token_id in sequence.request.eos_ids:
            return "stop"
        return "length" if self._fills(sequence, place) else None


def _is_greedy(scheduled: Scheduled) -> bool:
    """Whether a request takes the likeliest token of the logits as they are."""
    sampling = scheduled.sequence.request.sampling
    return sampling.greedy and not sampling.needs_history and not sampling.logit_bias


def _logprobs(logits: torch.Tensor, ids: torch.Tensor, due: Sequence[Scheduled]) -> tuple[torch.Tensor, ...]:
    """`top_logprobs` of as many tokens as any request asked for; nothing when none asked."""
    most = max((k for s in due if (k := s.sequence.request.sampling.logprobs) is not None), default=None)
    return () if most is None else top_logprobs(logits, ids, most)


def _row_logprobs(scheduled: Scheduled, row: int, logprobs: list[list]) -> TokenLogprobs | None:
    """What one request asked to know of its token's probability."""
    asked = scheduled.sequence.request.sampling.logprobs
    if asked is None:
        return None
    chosen, top, top_ids = logprobs
    return TokenLogprobs(chosen[row], top_ids[row][:asked], top[row][:asked])
