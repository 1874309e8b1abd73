"""How much text a token can stand for at most: a text that cannot fit is refused without being tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .pieces import BYTE_LETTERS

if TYPE_CHECKING:
    import tokenizers

_NFC_FACTOR = 4
"""So many characters at most become one: the longest canonical decomposition, of which Unicode promises no longer one."""

_KEEPING = ("ByteLevel", "Metaspace", "Digits")
"""Pre-tokenizers that drop no character."""


def characters_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Characters that one token of an encoded text stands for at most; None where there is no bound.

    There is one where no step drops characters, and no token takes in what is around it.
    """
    factor = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor = _NFC_FACTOR
        elif not _keeps_length(step):
            return None
    splits = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    if not all(s["type"] in _KEEPING or (s["type"] == "Split" and s["behavior"] != "Removed") for s in splits):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added) or not _knows_every_character(backend):
        return None
    return factor * max(map(len, backend.get_vocab()))


def _steps(component: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json writes them."""
    document = None if component is None else json.loads(component.__getstate__())
    pending = [] if document is None else [document]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step[inner], *pending]
        else:
            yield step


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer leaves at least as many characters as there were."""
    if step["type"] == "Replace":
        return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + "x"))
    return step["type"] in ("ByteLevel", "Prepend")


def _knows_every_character(backend: tokenizers.Tokenizer) -> bool:
    """Whether the model has a token for every byte: what it does not know it may drop, or take for one token in a row."""
    import tokenizers.models

    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    names = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else BYTE_LETTERS
    if not model.byte_fallback and not any(
        step["type"] == "ByteLevel"
        for component, inner in ((backend.normalizer, "normalizers"), (backend.pre_tokenizer, "pretokenizers"))
        for step in _steps(component, inner)
    ):
        return False
    return all(model.token_to_id(name) is not None for name in names)
