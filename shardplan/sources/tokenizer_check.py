"""Whether a tokenizer fits a model's embedding, from tokenizer.json alone."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import CheckpointError
from ..values import counted, shown
from .files import DOWNLOAD_AGAIN, wrong_content

_LISTED = 8  # tokens that a note names


class _Vocabulary(msgspec.Struct):
    """BPE, WordPiece and WordLevel map pieces to ids; Unigram lists (piece, score), the position being the id."""

    vocab: dict[str, int] | list[Any]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    """What is needed of tokenizer.json; msgspec checks the syntax of the rest and skips it."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] | None = None


def check_tokenizer(content: bytes, vocab_size: object, where: str) -> list[str]:
    """Notes about `content` (tokenizer.json) for a model with `vocab_size` embedding rows.

    Raises CheckpointError starting with `where` when it is malformed, or when ordinary text can give an id that has
    no row. Special tokens past the embedding, which only a prompt that names them can contain, make a note.
    A `vocab_size` that is not a positive integer is left to the config's own check.
    """
    try:
        tokenizer = msgspec.json.decode(content, type=_Tokenizer)
    except (msgspec.DecodeError, RecursionError) as error:
        reason, hint = wrong_content(content) or (f"not a tokenizer: {error}", DOWNLOAD_AGAIN)
        raise CheckpointError(f"{where}: {reason}", hint) from None
    if type(vocab_size) is not int or vocab_size <= 0:
        return []
    vocab, added = tokenizer.model.vocab, tokenizer.added_tokens or []
    special = {token.id for token in added if token.special}
    ordinary = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    ordinary.update(token.id for token in added if not token.special)
    past = sorted(i for i in ordinary - special if not 0 <= i < vocab_size)
    if past:
        raise CheckpointError(
            f"{where}: {counted(len(past), 'ordinary token')} outside the model's {counted(vocab_size, 'embedding row')}"
            f" (ids {past[0]} to {past[-1]})",
            "take tokenizer and weights from the same model",
        )
    beyond = sorted(t.content for t in added if t.special and not 0 <= t.id < vocab_size)
    if not beyond:
        return []
    listed = ", ".join(map(shown, beyond[:_LISTED])) + (", ..." if len(beyond) > _LISTED else "")
    count, rows = counted(len(beyond), "special token"), counted(vocab_size, "embedding row")
    return [f"{count} past the {rows} cannot be used: {listed}"]
