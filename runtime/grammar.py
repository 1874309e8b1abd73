"""Answers in a given form: which tokens may come next in each request, on the leader, by llguidance.

Shapes: S sequences of the batch, G of them with a grammar, V vocabulary (padding included).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..shardplan.errors import UsageError
from .grammar_tokenizer import load_tokenizer
from .messages import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammars:
    """Where each request stands in its grammar. Requests without one cost nothing."""

    def __init__(self, tokenizer_json: bytes | None, vocab_size: int) -> None:
        self._tokenizer_json, self._vocab_size = tokenizer_json, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._matchers: dict[str, LLMatcher] = {}

    def add(self, request: Request) -> None:
        """Take a request's grammar, if it has one; raises UsageError when it cannot be used."""
        if request.grammar is None:
            return
        from llguidance import LLMatcher

        matcher = LLMatcher(self._load_tokenizer(request.eos_ids), request.grammar)
        if matcher.is_error():
            raise UsageError(f"the response format cannot be used: {matcher.get_error()}", "simplify the schema")
        self._matchers[request.id] = matcher

    def _load_tokenizer(self, eos_ids: Sequence[int]) -> LLTokenizer:
        """The tokenizer as llguidance sees it: made once, since that takes a while for a large vocabulary."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._tokenizer_json, self._vocab_size, eos_ids)
        return self._tokenizer

    @property
    def any(self) -> bool:
        """Whether any request has a grammar."""
        return bool(self._matchers)

    def drop(self, request_id: str) -> None:
        """Forget a request."""
        self._matchers.pop(request_id, None)

    def mask(self, logits: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor:
        """`logits` [S, V] with -inf for what may not come next; the same tensor when no request has a grammar."""
        rows = [row for row, request_id in enumerate(request_ids) if request_id in self._matchers]
        if not rows:
            return logits
        packed = torch.stack([_words(self._matchers[request_ids[row]]) for row in rows])
        bits = (packed[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = torch.zeros((len(rows), logits.shape[-1]), dtype=torch.bool)
        width = min(logits.shape[-1], bits.shape[1] * 32)
        allowed[:, :width] = bits.flatten(1)[:, :width] == 1
        index = torch.tensor(rows, device=logits.device)
        masked = logits.clone()
        masked[index] = masked[index].masked_fill(~allowed.to(logits.device), float("-inf"))
        return masked

    def accept(self, request_id: str, token_id: int) -> bool:
        """Go on by a token that was chosen; whether the answer is complete, so that nothing can follow."""
        matcher = self._matchers.get(request_id)
        if matcher is None:
            return False
        return not matcher.consume_token(token_id) or matcher.is_stopped()


def _words(matcher: LLMatcher) -> torch.Tensor:
    """int32 [V / 32]: a bit for every token, the lowest first."""
    return torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
