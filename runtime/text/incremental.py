"""Ids to text, one id at a time: the joined pieces are the text that decoding all ids at once gives."""

from __future__ import annotations

import codecs
from typing import Protocol

from .pieces import PieceRules
from .tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text as they come."""

    def push(self, token_id: int) -> str:
        """The characters that are whole now that `token_id` has come; often none, sometimes several."""
        ...

    def finish(self) -> str:
        """What was held back; an incomplete character becomes one U+FFFD. Nothing may be pushed afterwards."""
        ...


def detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = True, continues_text: bool = False) -> Detokenizer:
    """A detokenizer that agrees with `tokenizer.decode` of the same options."""
    rules = tokenizer.piece_rules
    if rules is None:
        return WindowDetokenizer(tokenizer, skip_special_tokens)
    return ByteDetokenizer(tokenizer, rules, skip_special_tokens, continues_text)


class ByteDetokenizer:
    """For tokenizers whose tokens stand for bytes: an incremental UTF-8 decoder over them."""

    def __init__(
        self, tokenizer: Tokenizer, rules: PieceRules, skip_special_tokens: bool, continues_text: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not continues_text
        self._strip_left = 0 if continues_text else rules.strip
        self._strip_char = rules.strip_char

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._tokenizer.token_bytes(token_id, self._at_start)
        if self._at_start:  # an id without a token is no first token
            self._at_start = self._tokenizer.token_name(token_id) is None
        return self._strip(self._utf8.decode(piece))

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while text and self._strip_left:
            if not text.startswith(self._strip_char):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDetokenizer:
    """For any other decoder: decodes the last few ids with and without the new ones, and takes the difference.

    The ids before `_read` are there as context only: their text has been given out. A text that ends in U+FFFD may
    be half a character, so it is held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._read = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.token_name(token_id) is None:
            return ""
        self._window.append(token_id)
        new = self._new_text()
        if not new or new.endswith("\ufffd"):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return new

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._window[: self._read], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(known) :]
