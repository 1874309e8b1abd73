"""Streamed text is the decoded text cut at the first stop string, whatever the ids and however they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from helpers_tokenizers import (
    byte_level_tokenizer,
    gemma_tokenizer,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
    wordpiece_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mgtp.runtime.text.stream import StopMatcher, TextStream
from mgtp.runtime.text.tokenizer import Tokenizer
from mgtp.shardplan.errors import UsageError

TOKENIZERS = {
    "byte_level": Tokenizer(byte_level_tokenizer(extra=2), {}),
    "sentencepiece": Tokenizer(sentencepiece_tokenizer(), {}),
    "gemma": Tokenizer(gemma_tokenizer(), {}),
    "metaspace": Tokenizer(metaspace_tokenizer(), {}),
    "wordpiece": Tokenizer(wordpiece_tokenizer(), {}),
}
PIECES = ["a", "b", "c", "ab", "é", "😀", " ", "the", " cat", "\ufffd", "<s>", "▁", "\n"]


def cut(text: str, stops: Iterable[str]) -> str:
    """`text` before the first of `stops` in it."""
    return text[: min((start for stop in stops if (start := text.find(stop)) >= 0), default=len(text))]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[int], list[str]]:
    """A kind of tokenizer, ids (well-formed text, single bytes, special and unknown ids mixed) and stop strings."""
    kind = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[kind]
    words = st.sampled_from(PIECES).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    single = st.integers(0, tokenizer.vocab_size + 3).map(lambda token_id: [token_id])
    ids = [token_id for part in draw(st.lists(words | single, max_size=25)) for token_id in part]
    text = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 4))
    from_text = spans.map(lambda span: text[span[0] : sum(span)] or "x")
    stops = draw(st.lists(from_text | st.text(st.sampled_from("abc é😀\ufffd"), min_size=1, max_size=3), max_size=3))
    return kind, ids, stops


@given(sequences(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_streamed_equals_unstreamed(case: tuple[str, list[int], list[str]], skip: bool, goes_on: bool) -> None:
    kind, ids, stops = case
    tokenizer = TOKENIZERS[kind]
    goes_on &= kind != "wordpiece"  # has no space to keep
    stream = TextStream(tokenizer, stops, skip_special_tokens=skip, continues_text=goes_on)
    text = tokenizer.decode(ids, skip_special_tokens=skip, continues_text=goes_on)
    given_out = ""
    for token_id in ids:
        given_out += stream.push(token_id)
        assert stream.text == given_out
        assert cut(text, stops).startswith(given_out)
    given_out += stream.finish()
    assert given_out == stream.text == cut(text, stops)
    assert (stream.stopped is not None) == (cut(text, stops) != text)
    assert stream.stopped is None or text[len(given_out) :].startswith(stream.stopped)
    assert stream.push(ids[0] if ids else 0) == stream.finish() == "" or stream.stopped is None


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    whole, pieces = StopMatcher(stops), StopMatcher(stops)
    expected = whole.push(text) + whole.finish()
    given_out, position = "", 0
    while position < len(text):
        end = position + data.draw(st.integers(1, 4))
        given_out += pieces.push(text[position:end])
        position = end
    assert given_out + pieces.finish() == expected == cut(text, stops)
    assert pieces.stopped == whole.stopped


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
@settings(max_examples=100, deadline=None)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for end in range(1, len(text) + 1):
        given_out += matcher.push(text[end - 1])
        held = text[len(given_out) : end]
        assert matcher.stopped or not held or any(stop.startswith(held) or stop in held for stop in stops)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
def test_an_emoji_comes_once_and_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id) for token_id in ids]
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
def test_half_an_emoji_at_the_end_is_one_replacement_character(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a😀", add_special_tokens=False)[:-2]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.text == tokenizer.decode(ids) == "a\ufffd"


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ["</tool>", "tooth"])
    pieces = [stream.push(token_id) for token_id in tokenizer.encode("to be </tooth")]
    assert pieces == ["", "", "to ", "b", "e", " ", "", "", "", "", "", "</", ""]
    assert (stream.stopped, stream.text) == ("tooth", "to be </")
    assert stream.push(0) == stream.finish() == ""


def test_a_stop_string_may_begin_in_an_incomplete_character() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ["\ufffd"])
    half = tokenizer.encode("a😀")[:3]
    assert "".join(map(stream.push, half)) + stream.finish() == "a"
    assert stream.stopped == "\ufffd"


def test_special_tokens_can_be_shown() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a</s>b")
    shown = TextStream(tokenizer, ["</s>"], skip_special_tokens=False)
    assert "".join(map(shown.push, ids)) == "a"
    assert shown.stopped == "</s>"
    assert "".join(map(TextStream(tokenizer).push, ids)) == "ab"


def test_the_first_space_of_sentencepiece() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("the cat")
    stream, goes_on = TextStream(tokenizer), TextStream(tokenizer, continues_text=True)
    assert [stream.push(token_id) for token_id in ids] == ["", "the", " cat"]
    assert [goes_on.push(token_id) for token_id in ids] == ["", " the", " cat"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        TextStream(TOKENIZERS["byte_level"], ["x", ""])


def test_a_token_costs_the_same_late_in_a_long_text() -> None:
    """Decoding the whole text for every token would take minutes here."""
    stream = TextStream(TOKENIZERS["wordpiece"], ["never to be seen"])
    start = time.monotonic()
    for _ in range(20_000):
        stream.push(2)
    assert time.monotonic() - start < 10
    assert stream.text == "cat" + " cat" * 19_999
