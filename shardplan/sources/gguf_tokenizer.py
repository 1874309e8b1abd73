"""tokenizer.json and tokenizer_config.json, built from the vocabulary in a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import TokenType

from .gguf_metadata import Metadata
from .gguf_vocab import PreTokenizer, Vocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "▁"


def tokenizer_json(vocab: Vocab, metadata: Metadata) -> str:
    """A `tokenizers` file that cuts text as the model's own tokenizer does.

    Raises CheckpointError when the library refuses the vocabulary.
    """
    try:
        tokenizer = _byte_level(vocab, vocab.pre) if vocab.pre is not None else _sentencepiece(vocab)
        _add_tokens(tokenizer, vocab)
        _add_ends(tokenizer, vocab)
        return tokenizer.to_str()
    except Exception as error:  # the library raises Exception itself
        reason = " ".join(str(error).split())
        raise metadata.error(f"the tokenizer in the metadata cannot be built: {reason:.200}") from None


def tokenizer_config(vocab: Vocab, max_length: int) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, and what is added around a prompt."""
    roles = [role for role in ("bos", "eos", "unk", "pad") if role in vocab.special]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocab.add_bos,
        "add_eos_token": vocab.add_eos,
    } | {f"{role}_token": vocab.tokens[vocab.special[role]] for role in roles}


def _byte_level(vocab: Vocab, pre: PreTokenizer) -> Tokenizer:
    """GPT-2's scheme: text is cut into pieces, their UTF-8 bytes are spelled as characters and merged."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    # Converters pad the vocabulary to the embedding with unused tokens, which the original does not have.
    ids = {vocab.tokens[i]: i for i in np.flatnonzero(vocab.types != TokenType.UNUSED).tolist()}
    merges = [(a, b) for a, b in vocab.merges if a in ids and b in ids and a + b in ids]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words))
    if pre.normalize:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    bytes_to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_to_characters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocab: Vocab) -> Tokenizer:
    """SentencePiece's BPE: spaces become ▁ and the best-scored pair merges first, over the whole text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {t: i for i, t in enumerate(vocab.tokens)}
    unk = vocab.tokens[vocab.special["unk"]] if "unk" in vocab.special else None
    byte_fallback = np.count_nonzero(vocab.types == TokenType.BYTE) == 256
    merges = _merges_from_scores(vocab)
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback))
    escape = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.add_space_prefix:
        # A normalizer, not Metaspace: text that starts with a space gets another one, as in SentencePiece.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = escape
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(vocab: Vocab) -> list[tuple[str, str]]:
    """Every way to make a token out of two, best score first, and for one token the longest left part first.

    SentencePiece looks up the text of two neighbours in its pieces; only normal pieces can come about so.
    """
    assert vocab.scores is not None
    mergeable = np.isin(vocab.types, (TokenType.NORMAL, TokenType.UNUSED))
    pieces = {t for t, can in zip(vocab.tokens, mergeable.tolist(), strict=True) if can}
    merges: list[tuple[str, str]] = []
    for i in np.argsort(-vocab.scores, kind="stable").tolist():
        token = vocab.tokens[i]
        if not mergeable[i]:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _add_tokens(tokenizer: Tokenizer, vocab: Vocab) -> None:
    """Tokens that are found in the text before anything is merged: control and user-defined ones.

    SentencePiece looks for user-defined ones where spaces are ▁ already, so that both match. That cannot be had with
    a space prefix, which the library would put before every token too; there they match the text as it stands.
    """
    from tokenizers import AddedToken

    control = [vocab.tokens[i] for i in np.flatnonzero(np.isin(vocab.types, (TokenType.CONTROL, TokenType.UNKNOWN)))]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    escaped = not vocab.byte_level and not vocab.add_space_prefix
    defined = [vocab.tokens[i] for i in np.flatnonzero(vocab.types == TokenType.USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=escaped, special=False) for token in defined])


def _add_ends(tokenizer: Tokenizer, vocab: Vocab) -> None:
    """The bos token before and the eos token after a text, where the model wants them."""
    from tokenizers import processors

    bos = [vocab.tokens[vocab.special["bos"]]] if vocab.add_bos else []
    eos = [vocab.tokens[vocab.special["eos"]]] if vocab.add_eos else []
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *[f"{t}:1" for t in bos], "$B:1", *[f"{t}:1" for t in eos]],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(bos + eos)],
        )
