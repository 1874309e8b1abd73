"""How many tokens a text has at least: one that cannot fit is refused without being tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .pieces import BYTE_LETTERS

if TYPE_CHECKING:
    import tokenizers

_NFC_FACTOR = 4
"""So many characters at most become one: the longest canonical decomposition, of which Unicode promises no longer one."""

_KEEPING = ("ByteLevel", "Metaspace", "Digits")
"""Pre-tokenizers that drop no character."""

_ASCII, _LATER, _FIRST = range(0x80), range(0x80, 0xC0), range(0xC2, 0xF5)
"""Bytes of UTF-8: characters of one byte, and of more bytes the later ones and the first."""


@dataclass(frozen=True)
class TextBound:
    """One token stands for so many `characters` at most. Those that cannot vanish begin with a byte of `counted`."""

    characters: int
    counted: bytes

    def least_tokens(self, text: str) -> int:
        """Tokens that an encoded text has at least."""
        content = text.encode("utf-8", "ignore")
        count = len(content) - len(content.translate(None, self.counted))
        return -(-count // self.characters)


def text_bound(backend: tokenizers.Tokenizer) -> TextBound | None:
    """The bound of a tokenizer; None where there is none.

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
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    counted = _counted(backend)
    if not counted or (factor > 1 and len(counted) < len(_ASCII) + len(_FIRST)):
        return None  # composed, a character could be one that vanishes
    return TextBound(factor * max(map(len, backend.get_vocab())), counted)


def _steps(component: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json writes them."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
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


def _counted(backend: tokenizers.Tokenizer) -> bytes:
    """First bytes of characters that the model has tokens for. What it does not know it drops, or lumps together."""
    import tokenizers.models

    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return b""
    if model.byte_fallback:
        known = {byte for byte in range(256) if model.token_to_id(f"<0x{byte:02X}>") is not None}
        whole = known.issuperset((*_ASCII, *_LATER, *_FIRST))
        return bytes((*_ASCII, *_FIRST)) if whole else b""
    steps = [*_steps(backend.normalizer, "normalizers"), *_steps(backend.pre_tokenizer, "pretokenizers")]
    if not any(step["type"] == "ByteLevel" for step in steps):
        return b""
    known = {byte for byte in range(256) if model.token_to_id(BYTE_LETTERS[byte]) is not None}
    first = _FIRST if known.issuperset(_LATER) else ()
    return bytes(byte for byte in (*_ASCII, *first) if byte in known)
