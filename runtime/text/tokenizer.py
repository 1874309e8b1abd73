"""The tokenizer of a shard set: text to ids and back, and the bytes of every single token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...shardplan.errors import CheckpointError, UsageError
from .files import one_line, read_json_object, token_text
from .pieces import PieceRules

if TYPE_CHECKING:
    import tokenizers

    from .least_tokens import TextBound


class Tokenizer:
    """A tokenizer.json with the special ids that the checkpoint's configuration names.

    Without a tokenizer.json the ids still work (`bos_id`, `eos_ids`, `vocab_size`); anything that needs text raises
    UsageError.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        tokenizer_config: Mapping[str, Any] | None = None,
        label: str = "the tokenizer",
    ) -> None:
        self._backend = backend
        self._config = config
        self._generation_config = generation_config or {}
        self._tokenizer_config = tokenizer_config or {}
        self._label = label
        self._pieces: dict[int, bytes] = {}
        if backend is not None:  # limits stored for training or batching would cut or pad a prompt
            backend.no_truncation()
            backend.no_padding()

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a folder whose config.json holds `config`; raises CheckpointError for a broken file."""
        path = folder / "tokenizer.json"
        return cls(
            _read_backend(path) if path.exists() else None,
            config,
            generation_config=read_json_object(folder / "generation_config.json"),
            tokenizer_config=read_json_object(folder / "tokenizer_config.json"),
            label=str(folder),
        )

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer.json, so that text can be encoded and decoded."""
        return self._backend is not None

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer; raises UsageError where there is no tokenizer.json."""
        if self._backend is None:
            raise UsageError(
                f"{self._label} has no tokenizer.json, so text can be neither read nor written",
                "give the prompt as token ids (--prompt-ids), or use a checkpoint that has a tokenizer.json",
            )
        return self._backend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the special tokens the tokenizer puts around it (a chat template writes its own).

        A text that already starts with BOS is not given a second one.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds U+{ord(text[error.start]):04X}, half of a surrogate pair, at character {error.start}",
                "send well-formed Unicode",
            ) from None
        ids = self._encode(text, add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            plain = self._encode(text, False)
            return ids[1:] if ids[1 : 1 + len(plain)] == plain else ids  # else both are the text's own
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of one text `encode` would do, but it holds the interpreter's lock: nothing else could run meanwhile.
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def least_tokens(self, text: str) -> int:
        """Tokens that `encode` would give at least, as far as that can be said without it: a lower bound, quickly had."""
        return 0 if self._text_bound is None else self._text_bound.least_tokens(text)

    @cached_property
    def _text_bound(self) -> TextBound | None:
        from .least_tokens import text_bound

        return text_bound(self.backend)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continues_text: bool = False) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, one for each incomplete character.

        `continues_text`: the ids go on from earlier text, so the space that SentencePiece puts before the first
        word is kept. Ids without a token (the padding of a vocabulary) have no text.
        """
        rules = self.piece_rules
        if rules is None:
            return self.backend.decode(self.known(ids), skip_special_tokens=skip_special_tokens)
        kept = [index for index in self.known(ids) if not (skip_special_tokens and index in self.special_ids)]
        first = b"" if continues_text or not kept else self.token_bytes(kept.pop(0), at_start=True)
        text = (first + b"".join(map(self.token_bytes, kept))).decode("utf-8", errors="replace")
        return text if continues_text else rules.strip_start(text)

    def token_bytes(self, token_id: int, at_start: bool = False) -> bytes:
        """The exact bytes a token stands for: a special token's are its name, an id without a token has none.

        `at_start`: as the first token of a text, which differs for some SentencePiece tokenizers.
        """
        if at_start:
            return self._find_piece(token_id, True)
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._find_piece(token_id, False)
        return piece

    def _find_piece(self, token_id: int, at_start: bool) -> bytes:
        token = self.token_name(token_id)
        if token is None:
            return b""
        if self.piece_rules is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode("utf-8")
        if self.piece_rules.byte_level and token_id in self._added and self.backend.model.id_to_token(token_id) is None:
            return token.encode("utf-8")  # matched as plain text when encoding, even if it looks like byte letters
        return self.piece_rules.piece(token, at_start)

    def token_name(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, None for an id without a token."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def known(self, ids: Iterable[int]) -> list[int]:
        """The ids that have a token."""
        return [token_id for token_id in ids if self.token_name(token_id) is not None]

    @cached_property
    def piece_rules(self) -> PieceRules | None:
        """How tokens become bytes; None when only the library can decode, and only whole lists of ids."""
        import json

        decoder = self.backend.decoder
        return PieceRules.from_decoder(None if decoder is None else json.loads(decoder.__getstate__()))

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which decoded text leaves out."""
        return frozenset(token_id for token_id, token in self._added.items() if token.special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id with a token; config.json's vocab_size where there is no tokenizer.json."""
        if self._backend is None:
            return int(self._setting("vocab_size") or 0)
        return max(self._backend.get_vocab_size(), max(self._added, default=-1) + 1)

    @cached_property
    def bos_id(self) -> int | None:
        """The id that begins a text, None where the checkpoint names none."""
        named = self._ids(self._tokenizer_config.get("bos_token"))
        return next(iter(named or self._ids(self._setting("bos_token_id"))), None)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a text: config.json's, generation_config.json's and tokenizer_config.json's together.

        Checkpoints name different ones in different files (a chat model's end of turn is often in only one of them).
        """
        places = (
            self._setting("eos_token_id"),
            self._generation_config.get("eos_token_id"),
            self._tokenizer_config.get("eos_token"),
        )
        return frozenset(token_id for place in places for token_id in self._ids(place))

    def _setting(self, key: str) -> Any:
        """A field of config.json; a multimodal model keeps it in its text_config."""
        value = self._config.get(key)
        nested = self._config.get("text_config")
        return nested.get(key) if value is None and isinstance(nested, Mapping) else value

    def _ids(self, value: Any) -> Sequence[int]:
        """The ids a field names: an id, a token's text or object, or a list of these. Unknown ones are left out."""
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,) if value >= 0 else ()
        if isinstance(value, list | tuple):
            return [token_id for item in value for token_id in self._ids(item)]
        token_id = None if (text := token_text(value)) is None else self._id_of(text)
        return () if token_id is None else (token_id,)

    def _id_of(self, text: str) -> int | None:
        """The id of the token spelled `text`; without a tokenizer.json those that tokenizer_config.json lists."""
        if self._backend is not None:
            return self._backend.token_to_id(text)
        listed = self._tokenizer_config.get("added_tokens_decoder")
        for token_id, token in listed.items() if isinstance(listed, Mapping) else ():
            if token_text(token) == text and str(token_id).isdecimal():
                return int(token_id)
        return None


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a file; raises CheckpointError when it cannot be read."""
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no Exception
        raise CheckpointError(
            f"{path}: tokenizers {tokenizers.__version__} cannot read it: {one_line(error)}",
            "shard with a tokenizer.json that it reads, or install a newer tokenizers",
        ) from None
