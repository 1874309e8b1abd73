"""tokenizer.json built from GGUF metadata cuts text as the model's own tokenizer does.

The references are other programs: the `sentencepiece` library for SentencePiece vocabularies, and for byte-level ones
the pre-tokenizers as the models' own tokenizer.json files spell them. The merges of the tiny vocabularies are learned
across spaces, digits and punctuation, so that a text that is cut elsewhere gives other ids.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.sources.gguf import GgufSource
from tests.helpers_gguf import byte_level_vocab, open_tiny, sentencepiece_vocab
from tests.texts import PLAIN, random_texts

TEXTS = [*PLAIN, *random_texts()]


def built(source: GgufSource) -> Tokenizer:
    return Tokenizer.from_str(source.files["tokenizer.json"].decode())


def ids(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
    return tokenizer.encode(text, **options).ids


# --- byte-level -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe() -> dict[str, Any]:
    """vocab and merges of a byte-level BPE learned on TEXTS as wholes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return json.loads(tokenizer.to_str())["model"]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


SPELL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "reference", "normalizer", "whole_words"),
    [
        ("gpt-2", [GPT2], None, False),
        ("smollm", [pre_tokenizers.Digits(individual_digits=True), GPT2], None, False),
        ("llama-bpe", [LLAMA3, SPELL], None, True),
        ("tekken", [TEKKEN, SPELL], None, True),
        ("qwen2", [QWEN2, SPELL], normalizers.NFC(), False),
        ("deepseek-r1-qwen", [QWEN2, SPELL], normalizers.NFC(), False),
    ],
)
def test_byte_level_text_is_cut_as_the_original_tokenizer_does(
    tmp_path: Path,
    bpe: dict[str, Any],
    pre: str,
    reference: list[pre_tokenizers.PreTokenizer],
    normalizer: normalizers.Normalizer | None,
    whole_words: bool,
) -> None:
    original = Tokenizer(models.BPE(bpe["vocab"], [tuple(m) for m in bpe["merges"]], ignore_merges=whole_words))
    original.pre_tokenizer = pre_tokenizers.Sequence(reference)
    original.decoder = decoders.ByteLevel()
    if normalizer is not None:
        original.normalizer = normalizer
    tokenizer = built(open_byte_level(tmp_path, bpe, pre))
    for text in TEXTS:
        expected = ids(original, text)
        assert ids(tokenizer, text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == original.decode(expected)


def open_byte_level(tmp_path: Path, bpe: dict[str, Any], pre: str) -> GgufSource:
    tokens = [*sorted(bpe["vocab"], key=bpe["vocab"].__getitem__), "<|begin|>", "<|end|>"]
    metadata = byte_level_vocab(pre) | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    return open_tiny(tmp_path, metadata=metadata)


def test_the_default_cuts_as_llama_cpp_does(tmp_path: Path, bpe: dict[str, Any]) -> None:
    def pieces(texts: list[str], pattern: str) -> list[str]:
        """Every text cut before and after each match, as llama.cpp does with one expression after the other."""
        return [p for text in texts for p in regex.split(f"({pattern})", text) if p]

    tokenizer = built(open_byte_level(tmp_path, bpe, "default"))
    for text in TEXTS:
        expected = pieces([text], r"[\p{P}\$\+<=>\^~\|]+")
        expected = pieces(expected, r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)")
        expected = pieces(pieces(expected, r"\p{N}+"), "[0-9][0-9][0-9]")
        assert tokenizer.pre_tokenizer is not None
        spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert [text[a:b] for a, b in spans] == expected


def test_llama3_takes_a_word_that_is_a_token_whole(tmp_path: Path) -> None:
    """Llama 3 has tokens that its merges cannot make."""
    vocab = byte_level_vocab("llama-bpe")
    vocab["tokenizer.ggml.tokens"].append("odd")
    vocab["tokenizer.ggml.token_type"].append(1)
    word = len(vocab["tokenizer.ggml.tokens"]) - 1
    assert ids(built(open_tiny(tmp_path, metadata=vocab)), "odd") == [1, word]
    vocab["tokenizer.ggml.pre"] = "gpt-2"
    assert len(ids(built(open_tiny(tmp_path, metadata=vocab)), "odd")) == 3


def test_control_user_defined_and_unused_tokens(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    tokenizer = built(source)
    vocab = byte_level_vocab()["tokenizer.ggml.tokens"]
    think, pad, hello = vocab.index("<think>"), vocab.index("[PAD]"), vocab.index("hello")
    assert ids(tokenizer, "<|im_start|>hello<think>hello<|im_end|>") == [1, hello, think, hello, 2]
    assert tokenizer.decode([1, hello, think, 2]) == "hello<think>"
    assert tokenizer.decode([1, hello, think, 2], skip_special_tokens=False) == "<|im_start|>hello<think><|im_end|>"
    assert pad not in ids(tokenizer, "[PAD]")
    assert tokenizer.decode([hello, pad]) == "hello", "padding of the vocabulary stands for nothing"


@pytest.mark.parametrize(
    ("kind", "pre", "flags", "expected"),
    [
        ("gpt2", "gpt-2", {}, (False, False)),
        ("gpt2", "qwen2", {}, (False, False)),
        ("gpt2", "llama-bpe", {}, (True, False)),
        ("gpt2", "tekken", {}, (True, False)),
        ("gpt2", "llama-bpe", {"bos": False}, (False, False)),
        ("gpt2", "gpt-2", {"bos": True, "eos": True}, (True, True)),
        ("llama", "default", {}, (True, False)),
        ("llama", "default", {"bos": False}, (False, False)),
        ("llama", "default", {"eos": True}, (True, True)),
    ],
)
def test_begin_and_end_tokens_follow_the_flags_and_llama_cpps_defaults(
    tmp_path: Path, kind: str, pre: str, flags: dict[str, bool], expected: tuple[bool, bool]
) -> None:
    metadata = byte_level_vocab(pre) if kind == "gpt2" else sentencepiece_vocab()
    metadata |= {f"tokenizer.ggml.add_{role}_token": value for role, value in flags.items()}
    source = open_tiny(tmp_path, "llama" if kind == "gpt2" else "gemma3", metadata=metadata)
    tokenizer = built(source)
    found = ids(tokenizer, "hello")
    assert (found[0] == 1, found[-1] == 2) == expected
    assert len(ids(tokenizer, "hello", add_special_tokens=False)) == len(found) - sum(expected)
    config = json.loads(source.files["tokenizer_config.json"])
    assert (config["add_bos_token"], config["add_eos_token"]) == expected


def test_repairs_are_noted(tmp_path: Path) -> None:
    merges = [*byte_level_vocab()["tokenizer.ggml.merges"], "x y", "q", "nope z"]
    metadata = {"tokenizer.ggml.merges": merges, "tokenizer.ggml.pre": None, "tokenizer.ggml.token_type": None}
    source = open_tiny(tmp_path, metadata=metadata)
    assert source.notes[0].startswith("tokenizer.ggml.pre is missing")
    assert source.notes[1] == "3 of 17 merges are about texts that are no tokens: left out"
    assert ids(built(source), "<|im_end|>hello")[0] == 2, "the stated end token is special without types too"


def test_a_vocabulary_that_the_library_refuses(tmp_path: Path) -> None:
    vocab = byte_level_vocab("llama-bpe")
    vocab["tokenizer.ggml.tokens"][1] = "<a:b:c>"
    source = open_tiny(tmp_path, metadata=vocab)
    with pytest.raises(CheckpointError, match=r"m\.gguf: the tokenizer in the metadata cannot be built"):
        source.files["tokenizer.json"]


# --- SentencePiece ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train() -> Callable[..., Any]:
    """A function that trains a SentencePiece BPE of some hundred pieces on TEXTS."""
    sentencepiece = pytest.importorskip("sentencepiece")

    def train(**options: Any) -> Any:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([text for text in TEXTS if "\0" not in text] * 3),
            model_writer=model,
            model_type="bpe",
            vocab_size=1200,
            byte_fallback=True,
            character_coverage=0.98,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=1,
            minloglevel=2,
            **options,
        )
        return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    return train


def as_metadata(model: Any, prefix: bool) -> dict[str, Any]:
    """Tokenizer metadata as llama.cpp's converter writes it: spaces of user-defined pieces are spaces."""
    pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    pieces = pb2.ModelProto.FromString(model.serialized_model_proto()).pieces
    texts = [p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in pieces]
    metadata = sentencepiece_vocab((text, p.score, p.type) for text, p in zip(texts, pieces, strict=True))
    return metadata | {"tokenizer.ggml.add_space_prefix": prefix}


def test_llama_vocabularies_cut_as_sentencepiece_does(tmp_path: Path, train: Callable[..., Any]) -> None:
    """With a space before the text, also before one that begins with a space."""
    model = train(add_dummy_prefix=True, split_by_whitespace=True)
    tokenizer = built(open_tiny(tmp_path, "gemma3", metadata=as_metadata(model, prefix=True)))
    assert ids(tokenizer, "hello")[0] == model.bos_id()
    for text in TEXTS:
        expected = model.encode(text)
        assert ids(tokenizer, text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == model.decode(expected)


def test_gemma_vocabularies_cut_as_sentencepiece_does(tmp_path: Path, train: Callable[..., Any]) -> None:
    """Without a space before the text; user-defined pieces are taken first, longest first, white space among them."""
    runs = ["▁" * n for n in range(2, 32)]
    model = train(add_dummy_prefix=False, user_defined_symbols=[*runs, "<b>", "<table>", "</table>", "<td>"])
    tokenizer = built(open_tiny(tmp_path, "gemma3", metadata=as_metadata(model, prefix=False)))
    for text in TEXTS:
        expected = model.encode(text)
        assert ids(tokenizer, text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == model.decode(expected)


def test_control_pieces_in_a_text_are_found(tmp_path: Path) -> None:
    tokenizer = built(open_tiny(tmp_path, "gemma3", metadata={"tokenizer.ggml.add_space_prefix": False}))
    assert ids(tokenizer, "</s>hello")[:2] == [1, 2]
    assert tokenizer.decode(ids(tokenizer, "</s>hello é")) == "hello é"


def test_a_shard_sets_folder_gives_the_same_ids_in_transformers(tmp_path: Path, bpe: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    sources = {"byte": open_byte_level(tmp_path, bpe, "llama-bpe")}
    sources["pieces"] = open_tiny(tmp_path, "gemma3")
    for name, source in sources.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, content in source.files.items():
            (folder / file).write_bytes(content)
        tokenizer, theirs = built(source), AutoTokenizer.from_pretrained(folder)
        for text in TEXTS[::3]:
            assert theirs(text)["input_ids"] == ids(tokenizer, text)
