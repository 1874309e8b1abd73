"""The vocabulary in a GGUF file's metadata, with llama.cpp's defaults for what is not stated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gguf.constants import TokenType

from ..values import counted, shown
from .gguf_metadata import Metadata

_MAX_TOKEN_LENGTH = 1024
_SPECIAL_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
}
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)
_BYTES = frozenset(f"<0x{i:02X}>" for i in range(256))
_SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unk": 0}

# Control tokens that end a turn in the chat formats of the supported families. Files name one end token; the models'
# own generation configs list these too.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level merges: each expression cuts the pieces of the one before it.

    With `whole_words` a piece that is a token is taken whole, whatever the merges say.
    """

    splits: tuple[str, ...]
    normalize: bool = False  # to NFC, which llama.cpp leaves out but the models' own tokenizers do
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3_PRE = PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_PRE = PreTokenizer((_QWEN2,), normalize=True)

PRE_TOKENIZERS = {
    # What llama.cpp does for files that do not say: close to Falcon's.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "falcon3": _LLAMA3_PRE,
    "pixtral": _LLAMA3_PRE,
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
}
"""`tokenizer.ggml.pre` of byte-level vocabularies."""


@dataclass(frozen=True)
class Vocab:
    """A vocabulary of V tokens; an id is a position in `tokens`.

    `types` [V] holds gguf TokenType values; `special` ids by role (bos, eos, unk, pad, eot, eom), only those that
    exist. `merges` and `pre` belong to byte-level vocabularies, `scores` [V] and `add_space_prefix` to SentencePiece.
    """

    tokens: list[str]
    types: np.ndarray
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    pre: PreTokenizer | None = None
    merges: list[tuple[str, str]] = field(default_factory=list)
    scores: np.ndarray | None = None
    add_space_prefix: bool = False

    @property
    def byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's alphabet of 256 bytes; else they are SentencePiece's."""
        return self.pre is not None

    def end_ids(self) -> list[int]:
        """Ids that end a reply, the stated one first."""
        stated = [self.special[role] for role in ("eos", "eot", "eom") if role in self.special]
        control = {self.tokens[i]: i for i in np.flatnonzero(self.types == TokenType.CONTROL).tolist()}
        return list(dict.fromkeys(stated + [control[text] for text in _END_OF_TURN if text in control]))


def read_vocab(metadata: Metadata) -> tuple[Vocab, list[str]]:
    """The vocabulary and notes on what was repaired or ignored.

    Raises CheckpointError, by name, for a tokenizer or pre-tokenizer that is not known and for lists that do not fit.
    """
    notes: list[str] = []
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise metadata.error(f"tokenizer {shown(kind)} is not supported", "supported: gpt2 (byte-level BPE), llama")
    tokens = _read_tokens(metadata)
    types = _read_types(metadata, tokens)
    special = _read_special(metadata, types, _SENTENCEPIECE_DEFAULTS if kind == "llama" else {})
    if kind == "gpt2":
        pre = _read_pre(metadata, notes)
        merges = _read_merges(metadata, tokens, notes)
        vocab = Vocab(tokens, types, special, *_read_ends(metadata, special, pre.add_bos), pre=pre, merges=merges)
    else:
        scores = _read_per_token(metadata, "scores", len(tokens))
        if scores is None:
            raise metadata.error("metadata 'tokenizer.ggml.scores' is missing")
        prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
        ends = _read_ends(metadata, special, True)
        vocab = Vocab(tokens, types, special, *ends, scores=scores.astype(np.float64), add_space_prefix=prefix)
    return vocab, notes


def _read_tokens(metadata: Metadata) -> list[str]:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise metadata.error("metadata 'tokenizer.ggml.tokens' is empty")
    longest = max(tokens, key=len)
    if len(longest) > _MAX_TOKEN_LENGTH:
        raise metadata.error(f"a token of {len(longest)} characters in 'tokenizer.ggml.tokens': the header is damaged")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        double = next(token for token in tokens if token in seen or seen.add(token))
        raise metadata.error(f"token {shown(double)} is there twice in 'tokenizer.ggml.tokens'")
    return tokens


def _read_per_token(metadata: Metadata, name: str, count: int) -> np.ndarray | None:
    """An array with one number a token, None where it is missing."""
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        return None
    values = metadata.numbers(key)
    if len(values) != count:
        raise metadata.error(f"metadata {key!r} has {counted(len(values), 'entry')} for {counted(count, 'token')}")
    return values


def _read_types(metadata: Metadata, tokens: list[str]) -> np.ndarray:
    """The token types, which can be changed; where they are missing, 0 for what is not known to be a byte."""
    types = _read_per_token(metadata, "token_type", len(tokens))
    if types is not None:
        return types.astype(np.int64)
    return np.array([TokenType.BYTE if token in _BYTES else 0 for token in tokens])


def _read_special(metadata: Metadata, types: np.ndarray, defaults: dict[str, int]) -> dict[str, int]:
    """Token ids by role. What is special by its role becomes so by type, unless it is a normal token.

    A default counts where the token it names is special, or no types are known.
    """
    special = {role: i for role, i in defaults.items() if i < len(types) and types[i] in (0, *_SPECIAL_TYPES)}
    for role, name in _SPECIAL_KEYS.items():
        key = f"tokenizer.ggml.{name}"
        if key in metadata:
            special[role] = metadata.integer(key)
            if special[role] >= len(types):
                raise metadata.error(f"metadata {key!r} is {special[role]}, beyond the {counted(len(types), 'token')}")
    for i in special.values():
        if types[i] in (0, TokenType.USER_DEFINED):
            types[i] = TokenType.CONTROL
    types[types == 0] = TokenType.NORMAL
    return special


def _read_ends(metadata: Metadata, special: dict[str, int], add_bos: bool) -> tuple[bool, bool]:
    """Whether a prompt gets a bos token before it and an eos token after it."""
    ends = {"bos": add_bos, "eos": False}
    for role in ends:
        key = f"tokenizer.ggml.add_{role}_token"
        ends[role] = metadata.flag(key, ends[role])
        if ends[role] and role not in special:
            raise metadata.error(f"a {role} token is to be added, but 'tokenizer.ggml.{role}_token_id' is missing")
    return ends["bos"], ends["eos"]


def _read_pre(metadata: Metadata, notes: list[str]) -> PreTokenizer:
    key = "tokenizer.ggml.pre"
    if key not in metadata:
        notes.append(f"{key} is missing: text is cut as llama.cpp does by default, which few models were trained with")
    name = metadata.text(key, "default")
    if name not in PRE_TOKENIZERS:
        raise metadata.error(f"{key} {shown(name)} is not supported", f"supported: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _read_merges(metadata: Metadata, tokens: list[str], notes: list[str]) -> list[tuple[str, str]]:
    """Merges as pairs. One that needs or makes a text that is no token can never lead to one: it is left out."""
    known, merges = set(tokens), []
    lines = metadata.strings("tokenizer.ggml.merges")
    for line in lines:
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and left in known and right in known and left + right in known:
            merges.append((left, right))
    if len(merges) < len(lines):
        notes.append(f"{len(lines) - len(merges)} of {len(lines)} merges are about texts that are no tokens: left out")
    return merges
