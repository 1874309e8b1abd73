"""The tokenizer as llguidance needs it, on the front to check a grammar and on the leader to follow it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..shardplan.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def load_tokenizer(tokenizer_json: bytes | None, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """A tokenizer for llguidance; raises UsageError where the model's cannot be used."""
    if tokenizer_json is None or not eos_ids:
        raise UsageError("this model has no tokenizer or no end of text, so answers cannot be given a form")
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_ids))
    except (ValueError, RuntimeError) as error:
        line = " ".join(str(error).split())[:200]
        raise UsageError(
            f"answers of this model cannot be given a form: its tokenizer is not supported: {line}"
        ) from None
