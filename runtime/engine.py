"""The leader's loop body: schedule, run, sample, hand out tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..shardplan.errors import UsageError
from .grammar import Grammars
from .messages import Request, RequestFailed, Step, TokenLogprobs, TokenOutput
from .penalties import TokenHistory, record
from .runner import Runner
from .sampling import Sampler, top_logprobs
from .scheduler import Scheduled, Scheduler
from .scheduler import Sequence as RunningSequence


class Engine:
    """Runs requests on the leader's runner; `send_step` tells the followers, before the step begins."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        max_model_len: int,
        send_step: Callable[[Step], None],
        tokenizer_json: bytes | None = None,
    ) -> None:
        self.runner, self.scheduler, self.max_model_len = runner, scheduler, max_model_len
        self.send_step = send_step
        self.sampler = Sampler()
        self.histories: dict[str, TokenHistory] = {}
        self.grammars = Grammars(tokenizer_json, runner.config.vocab_size)
        self._refused: list[RequestFailed] = []

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
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self.scheduler.abort(request_id)
        self.histories.pop(request_id, None)
        self.grammars.drop(request_id)

    def step(self) -> tuple[list[TokenOutput], list[RequestFailed]]:
        """One forward pass over what is due: the tokens that came of it, and the requests that cannot go on."""
        failures, self._refused = self._refused, []
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return [], failures
        step = Step([s.step for s in scheduled])
        self.send_step(step)
        logits = self.runner.forward(step)
        due = [s for s in scheduled if s.step.sample]
        if not due:
            return [], failures
        histories = [self.histories.get(s.sequence.request.id) for s in due]
        positions = [s.step.start + s.step.num_tokens for s in due]
        masked = self.grammars.mask(logits, [s.sequence.request.id for s in due])
        sampled = self.sampler.sample(masked, [s.sequence.request.sampling for s in due], positions, histories)
        self.runner.settle(step, sampled.ids)
        record(histories, sampled.ids)
        logprobs = self._logprobs(logits, sampled.ids, due)
        outputs = []
        for s, token_id, bad, lp in zip(due, sampled.ids.tolist(), sampled.failed.tolist(), logprobs, strict=True):
            if bad:
                failures.append(self._fail(s.sequence))
            else:
                outputs.append(self._deliver(s.sequence, token_id, lp))
        return outputs, failures

    def _deliver(self, sequence: RunningSequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """Append a token to its sequence, and end the sequence when it is the last."""
        sequence.output_ids.append(token_id)
        reason = self._finish_reason(sequence, token_id)
        if reason is not None:
            self._end(sequence)
        return TokenOutput(sequence.request.id, token_id, reason, logprobs)

    def _fail(self, sequence: RunningSequence) -> RequestFailed:
        self._end(sequence)
        return RequestFailed(
            sequence.request.id,
            f"the logits after {sequence.num_tokens} tokens are not finite: the weights may overflow in this dtype",
        )

    def _end(self, sequence: RunningSequence) -> None:
        self.scheduler.finish(sequence)
        self.histories.pop(sequence.request.id, None)
        self.grammars.drop(sequence.request.id)

    def _finish_reason(self, sequence: RunningSequence, token_id: int) -> str | None:
        sampling = sequence.request.sampling
        if self.grammars.accept(sequence.request.id, token_id) or token_id in sampling.stop_token_ids:
            return "stop"
        if not sampling.ignore_eos and token_id in sequence.request.eos_ids:
            return "stop"
        if len(sequence.output_ids) >= sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            return "length"
        return None

    @staticmethod
    def _logprobs(logits: torch.Tensor, ids: torch.Tensor, due: Sequence[Scheduled]) -> list[TokenLogprobs | None]:
        """What each request asked to know of its token's probability; nothing is computed when none asked."""
        asked = [s.sequence.request.sampling.logprobs for s in due]
        most = max((k for k in asked if k is not None), default=None)
        if most is None:
            return [None] * len(due)
        chosen, top, top_ids = (t.tolist() for t in top_logprobs(logits, ids, most))
        return [
            None if k is None else TokenLogprobs(chosen[row], top_ids[row][:k], top[row][:k])
            for row, k in enumerate(asked)
        ]
