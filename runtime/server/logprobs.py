"""Log-probabilities in OpenAI's two forms. A token of a byte-level vocabulary need not be text: its bytes are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..messages import TokenLogprobs
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .generation import TokenEntry

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenEntry]) -> dict[str, Any]:
    """The form of chat completions: a list of tokens, each with a list of the likeliest."""
    content = []
    for entry in entries:
        assert entry.logprobs is not None  # only a prompt's first token has none, and a chat does not show its prompt
        top = [_token(tokenizer, i, p) for i, p in zip(entry.logprobs.top_ids, entry.logprobs.top, strict=True)]
        content.append({**_token(tokenizer, entry.token_id, entry.logprobs.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """The form of completions: parallel lists, and for the likeliest tokens objects with one key a token.

    `bytes` is an addition.
    """
    return {
        "tokens": [_key(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprobs and _finite(entry.logprobs.chosen) for entry in entries],
        "top_logprobs": [_top(tokenizer, entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
        "bytes": [list(_bytes(tokenizer, entry.token_id)) for entry in entries],
    }


def prompt_entries(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], following: Sequence[TokenLogprobs]
) -> list[TokenEntry]:
    """A prompt's tokens, each where its text begins in the decoded prompt."""
    stream = TextStream(tokenizer) if tokenizer.has_text else None
    entries = []
    for token_id, logprobs in zip(prompt_ids, [None, *following], strict=True):
        entries.append(TokenEntry(token_id, stream.decoded_length if stream is not None else 0, logprobs))
        if stream is not None:
            stream.push(token_id)
    return entries


def _top(tokenizer: Tokenizer, entry: TokenEntry) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one; tokens that read alike are told apart by their ids."""
    if entry.logprobs is None:
        return None
    top: dict[str, float] = {}
    pairs = dict(zip(entry.logprobs.top_ids, entry.logprobs.top, strict=True))
    pairs.setdefault(entry.token_id, entry.logprobs.chosen)
    for token_id, value in pairs.items():
        key = _key(tokenizer, token_id)
        top[f"token_id:{token_id}" if key in top else key] = _finite(value)
    return top


def _token(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, Any]:
    content = _bytes(tokenizer, token_id)
    return {"token": content.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(content)}


def _key(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; where it is none, its bytes as OpenAI writes them, or its id."""
    content = _bytes(tokenizer, token_id)
    if not content:
        return f"token_id:{token_id}"
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer.has_text else b""


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
