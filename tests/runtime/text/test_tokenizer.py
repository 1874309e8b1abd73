"""Ids, special ids and bytes of every kind of tokenizer; broken and missing files."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers_tokenizers import (
    byte_level_tokenizer,
    gemma_tokenizer,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
    wordpiece_tokenizer,
    write_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from mgtp.runtime.text.tokenizer import Tokenizer
from mgtp.shardplan.errors import CheckpointError, MgtpError, UsageError

TEXTS = ("the cat sat on the mat.", " the  cat", "naïve café", "中文 and 😀😀", "tab\tand\nnewline", "", " ", "a\x00b")


def nfc_tokenizer():
    """Qwen's kind."""
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.NFC()
    return backend


def few_bytes_tokenizer():
    """SmolLM2's kind: bytes that its training has not seen have no token, and vanish."""
    backend = byte_level_tokenizer()
    letters = sorted(
        set(pre_tokenizers.ByteLevel.alphabet()) - set("\u010a\u00f1")
    )  # of a line break and U+40000 to U+7FFFF
    backend.model = models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    return backend


KINDS = {
    "nfc": nfc_tokenizer,
    "few_bytes": few_bytes_tokenizer,
    "byte_level": lambda: byte_level_tokenizer(extra=3),
    "sentencepiece": sentencepiece_tokenizer,
    "gemma": gemma_tokenizer,
    "metaspace": metaspace_tokenizer,
    "wordpiece": wordpiece_tokenizer,
}


def load(folder: Path, backend=None, settings=None, config=None, **files) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(folder, backend, settings, **files), config or {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_agree_with_the_library(kind: str, text: str) -> None:
    backend = KINDS[kind]()
    tokenizer = Tokenizer(backend, {})
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(kind: str, text: str) -> None:
    tokenizer = Tokenizer(KINDS[kind](), {})
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
def test_the_bytes_of_the_tokens_make_up_the_text(kind: str) -> None:
    text = "the cat 😀 sat, é中 on a ☃"
    tokenizer = Tokenizer(KINDS[kind](), {})
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
    assert joined == (" " if kind == "sentencepiece" else "").encode() + text.encode()


def test_token_bytes_of_byte_tokens_words_and_special_tokens() -> None:
    tokenizer = Tokenizer(sentencepiece_tokenizer(), {})
    (cat,) = tokenizer.encode("cat", add_special_tokens=False)
    assert [tokenizer.token_bytes(3 + byte) for byte in (0, 0x9F, 0xFF)] == [b"\x00", b"\x9f", b"\xff"]
    assert tokenizer.token_bytes(cat) == b" cat"
    assert tokenizer.token_bytes(2) == b"</s>"
    assert tokenizer.token_bytes(99999) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([99999, cat]) == "cat"
    byte_level = Tokenizer(byte_level_tokenizer(), {})
    assert sorted(byte_level.token_bytes(index) for index in range(256)) == [bytes([byte]) for byte in range(256)]


def test_added_tokens_are_plain_text_even_where_they_look_like_byte_letters() -> None:
    """The library decodes the added token "ü" as the lone byte 0xFC, which loses it."""
    backend = byte_level_tokenizer()
    backend.model = type(backend.model)(vocab={"a": 0}, merges=[])
    backend.add_tokens(["ü", "  "])
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.decode(tokenizer.encode("aü  a")) == "aü  a"


def test_incomplete_characters_become_one_replacement_character() -> None:
    """The library writes one for every byte, and does so for whole characters too when a broken one follows."""
    tokenizer = Tokenizer(sentencepiece_tokenizer(), {})
    grin = [3 + byte for byte in "😀".encode()]
    assert tokenizer.decode(grin[:2]) == "\ufffd"
    assert tokenizer.decode([*grin, grin[0]]) == "😀\ufffd"


def test_text_that_goes_on_keeps_its_space() -> None:
    tokenizer = Tokenizer(sentencepiece_tokenizer(), {})
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, continues_text=True) == " the cat"
    assert Tokenizer(metaspace_tokenizer(), {}).decode(ids, continues_text=True) == " the cat"


def test_bos_is_added_at_most_once(tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "a", byte_level_tokenizer(bos=True))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == tokenizer.encode("<s>hi") == [256, *plain]
    assert tokenizer.encode("<s><s>hi") == [256, 256, *plain]
    assert tokenizer.encode("") == tokenizer.encode("<s>") == [256]
    without = load(tmp_path / "b", byte_level_tokenizer())
    assert without.encode("hi") == plain
    assert without.encode("<s><s>hi") == [256, 256, *plain]


def test_stored_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(load(tmp_path, backend).encode("0123456789")) == 10
    assert len(load(tmp_path, backend).encode("0")) == 1


def test_half_a_surrogate_pair_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"U\+D83D.* character 2"):
        Tokenizer(byte_level_tokenizer(), {}).encode("ab\ud83d")


def test_eos_ids_are_the_union_of_all_places(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        byte_level_tokenizer(),
        {"eos_token": {"content": "<|user|>", "special": True}, "bos_token": None},
        {"eos_token_id": 257, "bos_token_id": 256},
        generation_config={"eos_token_id": [259, 5, None]},
    )
    assert tokenizer.eos_ids == {257, 259, 5, 258}
    assert tokenizer.bos_id == 256


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, set()),
        ({"eos_token_id": None}, set()),
        ({"eos_token_id": ["</s>", 7]}, {257, 7}),
        ({"eos_token_id": "no such token"}, set()),
        ({"eos_token_id": True}, set()),
        ({"eos_token_id": -1}, set()),
        ({"text_config": {"eos_token_id": 9}}, {9}),
    ],
)
def test_eos_ids_of_every_spelling(config: dict, expected: set[int]) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), config)
    assert tokenizer.eos_ids == expected
    assert tokenizer.bos_id is None


def test_special_ids_and_vocab_size() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(extra=2), {"vocab_size": 512})
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.vocab_size == 262
    assert tokenizer.token_name(261) == "<extra_1>"


def test_without_tokenizer_json_ids_work_and_text_does_not(tmp_path: Path) -> None:
    settings = {"eos_token": "<end>", "added_tokens_decoder": {"11": {"content": "<end>"}, "x": {"content": "?"}}}
    tokenizer = load(tmp_path, None, settings, {"vocab_size": 64, "bos_token_id": 3, "eos_token_id": [1]})
    assert not tokenizer.has_text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (3, {1, 11}, 64)
    for use in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1]), lambda: tokenizer.special_ids):
        with pytest.raises(MgtpError, match=r"no tokenizer\.json") as caught:
            use()
        assert "token ids" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": {}}', b"version https://git-lfs"]
)
def test_a_broken_tokenizer_json_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path, {})
    assert "\n" not in caught.value.message
    assert "cannot read it" in caught.value.message and "copy" not in caught.value.hint


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_broken_settings_name_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        Tokenizer.load(tmp_path, {})
    assert "\n" not in caught.value.message


def test_importing_the_package_is_cheap() -> None:
    """The front must start at once: nothing heavy may come in with the modules."""
    code = (
        "import sys, mgtp.runtime.text.chat, mgtp.runtime.text.stream, mgtp.runtime.sampling_params;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'jinja2', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma", "metaspace", "nfc", "few_bytes"])
@given(text=st.text(max_size=60) | st.text(" \t\n\u0301\u00e9e\u1100\u1161\u11a8the", max_size=200))
def test_a_text_has_no_fewer_tokens_than_said(kind: str, text: str) -> None:
    tokenizer = Tokenizer(KINDS[kind](), {})
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except UsageError:
        return
    assert tokenizer.least_tokens(text) <= len(ids)
    assert tokenizer.least_tokens("e" * 1000) > 10


def test_no_bound_where_text_can_vanish() -> None:
    """A token that takes in the space around it, a step that drops characters, unknown ones that are lumped together."""
    greedy = byte_level_tokenizer()
    greedy.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    stripped, split, lossy = (byte_level_tokenizer() for _ in range(3))
    stripped.normalizer = normalizers.Strip()
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    lossy.pre_tokenizer = None
    shorter = gemma_tokenizer()
    shorter.normalizer = normalizers.Replace("  ", " ")
    for backend in (greedy, stripped, split, lossy, shorter, wordpiece_tokenizer()):
        assert Tokenizer(backend, {}).least_tokens("e" * 1000) == 0


def test_others_run_while_a_long_text_is_encoded() -> None:
    """The library lets go of the interpreter's lock."""
    tokenizer, turns = Tokenizer(byte_level_tokenizer(), {}), 0
    thread = threading.Thread(target=lambda: tokenizer.encode("the cat sat on the mat " * 100_000))
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10
