"""A tokenizer that can give ids without an embedding row is found when the checkpoint is opened, not by a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.sources.tokenizer_check import check_tokenizer

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}


def check(vocab_size: object, added: Any = (), model: Any = BPE, **more: Any) -> list[str]:
    content = {"model": model, "added_tokens": added if added is None else list(added), **more}
    return check_tokenizer(json.dumps(content).encode(), vocab_size, "tokenizer.json")


def token(number: int, content: str = "<x>", special: bool = True) -> dict[str, Any]:
    return {"id": number, "content": content, "special": special, "lstrip": False}


def test_a_fitting_tokenizer_makes_no_note() -> None:
    assert check(3) == []
    assert check(4, [token(3)]) == []
    assert check(3, None) == []
    assert check(2, model={"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.5]]}) == []


@pytest.mark.parametrize("vocab_size", [None, 0, -5, "3", 2.0, True, [1]])
def test_a_senseless_vocab_size_is_left_to_the_config(vocab_size: object) -> None:
    assert check(vocab_size) == []


def test_ordinary_ids_past_the_embedding_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"1 ordinary token outside the model's 2 embedding rows"):
        check(2)
    with pytest.raises(CheckpointError, match=r"ids 2 to 2"):
        check(2, model={"type": "Unigram", "vocab": [["a", 0], ["b", 0], ["c", 0]]})
    with pytest.raises(CheckpointError, match=r"ids 7 to 9"):
        check(3, [token(9, special=False), token(7, special=False)])
    with pytest.raises(CheckpointError, match="ordinary"):
        check(3, model={"type": "BPE", "vocab": {"a": -1}})
    with pytest.raises(CheckpointError, match="ordinary"):
        check(3, model={"type": "BPE", "vocab": {"a": 10**30}})


def test_special_tokens_past_the_embedding_make_a_note() -> None:
    assert check(3, [token(3, "<pad>")]) == ["1 special token past the 3 embedding rows cannot be used: '<pad>'"]
    # a special token may stand in the vocabulary too
    assert len(check(2, [token(2)])) == 1
    (note,) = check(3, [token(3 + i, f"<{i:02}>") for i in range(20)])
    assert note.startswith("20 special tokens")
    assert note.endswith("'<07>', ...")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"model": {}}', b'{"model": []}', b'{"model": {"vocab": 3}}',
        b'{"model": {"vocab": {"a": "0"}}}', b'{"model": {"vocab": {"a": 0.5}}}', b'{"model": {"vocab": {"a": null}}}',
        b'{"model": {"vocab": {}}, "added_tokens": {}}', b'{"model": {"vocab": {}}, "added_tokens": [1]}',
        b'{"model": {"vocab": {}}, "added_tokens": [{"id": "1", "content": ""}]}',
        b'{"model": {"vocab": {}}, "added_tokens": [{"content": ""}]}',
        pytest.param(b'{"model": ' + b"[" * 100_000, id="deep"),
        pytest.param(b'{"other": ' + b"[" * 100_000, id="deep elsewhere"),
        b"version https://git-lfs.github.com/spec/v1\n", b"<html>",
    ],
)  # fmt: skip
def test_malformed_tokenizers_are_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: ") as caught:
        check_tokenizer(content, 3, "tokenizer.json")
    assert caught.value.hint
