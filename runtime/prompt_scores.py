"""Log-probabilities of prompts: collected while prompts are computed, handed out with the first generated token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .messages import Request, TokenLogprobs
from .sampling import top_logprobs
from .scheduler import Scheduled


class PromptScores:
    """What is known so far of the prompts that somebody wants scored, by request."""

    def __init__(self) -> None:
        self._found: dict[str, list[TokenLogprobs]] = {}

    def expect(self, request: Request) -> None:
        """A new request: where its prompt is wanted, scores come with its first token, none of a prompt of one token."""
        if request.sampling.prompt_logprobs is not None:
            self._found[request.id] = []

    def take(self, logits: torch.Tensor, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        """Note what a step's logits [L, V] say of prompts; the rows [S, V] that are sampled from."""
        if not any(s.step.score for s in scheduled):
            return logits
        sampled, row = [], 0
        for s in scheduled:
            count = len(s.step.logit_tokens)
            if s.step.score:
                self._note(logits[row : row + count], s)
            row += count
            if s.step.sample:
                sampled.append(row - 1)
        return logits[torch.tensor(sampled, dtype=torch.int64, device=logits.device)]

    def _note(self, logits: torch.Tensor, scheduled: Scheduled) -> None:
        """The logits after tokens [start, start + n) of a prompt say how likely the tokens behind them were."""
        request, start = scheduled.sequence.request, scheduled.step.start
        following = request.prompt_ids[start + 1 : start + 1 + len(logits)]
        asked = request.sampling.prompt_logprobs
        assert asked is not None
        ids = torch.tensor(following, dtype=torch.int64, device=logits.device)
        chosen, top, top_ids = (t.tolist() for t in top_logprobs(logits[: len(following)], ids, asked))
        entries = [TokenLogprobs(*entry) for entry in zip(chosen, top_ids, top, strict=True)]
        self._found[request.id][start:] = entries  # again from the beginning, when the sequence was preempted

    def pop(self, request_id: str) -> list[TokenLogprobs] | None:
        """All of a prompt's tokens but the first, which follows nothing; None when nobody asked, or had them before."""
        return self._found.pop(request_id, None)
