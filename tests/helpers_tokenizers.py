"""Tiny tokenizers of the kinds that checkpoints have, made in memory: no download, every id known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS = "<s>", "</s>"
WORDS = ("▁the", "▁a", "▁on", "▁cat", "▁sat", "▁mat")


def byte_level_tokenizer(extra: int = 0, bos: bool = False) -> Tokenizer:
    """GPT-2's kind without merges: ids 0 to 255 are the bytes (in the order of their letters), 256 BOS, 257 EOS.

    258 and 259 are <|user|> and <|assistant|>, then come `extra` ordinary added tokens. `bos`: encoding adds a BOS.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (BOS, EOS, "<|user|>", "<|assistant|>")])
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(extra)])
    if bos:
        _add_bos(tokenizer)
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's kind: words with "▁" for a space, 256 byte tokens for everything else, a BOS before every text.

    0 <unk>, 1 BOS, 2 EOS, 3 to 258 the bytes in order, then "▁" and letters, then merged words.
    """
    tokenizer = Tokenizer(_word_bpe())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", BOS, EOS)])
    _add_bos(tokenizer)
    return tokenizer


def gemma_tokenizer() -> Tokenizer:
    """The same vocabulary without the space before the first word: nothing is cut from the start of a text."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """The same vocabulary decoded by Metaspace, whose first token loses its "▁"; no byte fallback."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """BERT's kind: its decoder cannot be read token by token."""
    names = ("[UNK]", "the", "cat", "##s", "##es", ",", ".", "dog", "mat", "##ing", "'", "s")
    tokenizer = Tokenizer(models.WordPiece(vocab={name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer | None, settings: Mapping[str, Any] | None = None, **files: Mapping[str, Any]
) -> Path:
    """Write tokenizer.json, tokenizer_config.json (BOS and EOS unless `settings` says otherwise) and NAME.json files."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS} if settings is None else settings
    for name, content in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _word_bpe() -> models.BPE:
    """A BPE whose merges build WORDS letter by letter from the left."""
    vocab = {name: index for index, name in enumerate(("<unk>", BOS, EOS))}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for letter in ("▁", "▁▁", *sorted(set("".join(WORDS)) - {"▁"}), ".", ",", "é", "中"):
        vocab[letter] = len(vocab)
    merges = [("▁", "▁")]
    for word in WORDS:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if pair not in merges:
                merges.append(pair)
                vocab[word[:end]] = len(vocab)
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def _add_bos(tokenizer: Tokenizer) -> None:
    """Have BOS put before every encoded text."""
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
