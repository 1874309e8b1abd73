"""What one token stands for: the decoder of tokenizer.json, read as a function from a token to its bytes.

The tokenizers library decodes a whole list of ids at once, which does not stream: text comes token by token, and a
character may be spread over several tokens. The decoders of language models are simple enough to be read token by
token, so that the text of a sequence is nothing but the concatenated bytes of its tokens, decoded as UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte -> that byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()

BYTE_LETTERS = sorted(_BYTE_OF, key=lambda letter: _BYTE_OF[letter])
"""How a byte-level vocabulary spells the bytes 0 to 255."""


@dataclass(frozen=True)
class PieceRules:
    """How a decoder turns a token into bytes, in the order in which it is applied.

    `replacements`: (old, new) texts, replaced in the token. `drop_at_start`: the first token of a text loses this
    character instead of having it replaced (metaspace). `byte_level`: the token is spelled in GPT-2's byte alphabet.
    `byte_fallback`: a token `<0xNN>` is one byte. `strip`: up to this many of `strip_char` are cut from the start of
    the whole text.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    drop_at_start: str = ""
    byte_level: bool = False
    byte_fallback: bool = False
    strip: int = 0
    strip_char: str = " "

    @classmethod
    def from_decoder(cls, decoder: Mapping[str, Any] | None) -> PieceRules | None:
        """The rules of a `decoder` entry of tokenizer.json; None when it cannot be applied token by token."""
        steps = list(_flatten(decoder))
        kinds = [step.get("type") for step in steps]
        fields: dict[str, Any] = {"replacements": ()}
        if "Strip" in kinds[-1:] and steps[-1].get("stop") == 0 and ({"Fuse", "ByteLevel"} & {*kinds}):
            fields.update(strip=steps[-1]["start"], strip_char=steps[-1]["content"])
            kinds.pop()
        while kinds[-1:] == ["Fuse"]:
            kinds.pop()
        if kinds[-1:] == ["ByteLevel"] or kinds[-1:] == ["ByteFallback"]:
            fields["byte_level" if kinds.pop() == "ByteLevel" else "byte_fallback"] = True
        for kind, step in zip(kinds, steps, strict=False):
            if kind == "Replace" and "String" in step["pattern"]:
                fields["replacements"] += ((step["pattern"]["String"], step["content"]),)
            elif kind == "Metaspace" and kinds == ["Metaspace"]:
                fields["replacements"] = ((step["replacement"], " "),)
                fields["drop_at_start"] = "" if step["prepend_scheme"] == "never" else step["replacement"]
            else:
                return None
        return cls(**fields) if steps else None

    def piece(self, token: str, at_start: bool = False) -> bytes:
        """The bytes of a token; `at_start` when it is the first of a text."""
        if at_start and self.drop_at_start:
            token = token.replace(self.drop_at_start, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token is plain text and may hold characters outside the byte alphabet
                pass
        return token.encode("utf-8")

    def strip_start(self, text: str) -> str:
        """`text` less the characters that the decoder cuts from the start of a whole text."""
        cut = 0
        while cut < self.strip and text.startswith(self.strip_char, cut):
            cut += 1
        return text[cut:]


def _flatten(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder, nested sequences opened."""
    if decoder is not None and decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    elif decoder is not None:
        yield decoder
