"""Tools: calls that must be made are made, and calls are read back from text however it is cut."""

from __future__ import annotations

import json
import random

import pytest

from mgtp.runtime.server.tools import BareReader, MarkedReader
from tests.runtime.server.conftest import MODEL
from tests.runtime.server.test_refusals import refuse

NAMES = frozenset({"add", "weather"})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "東京"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds."}}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "tools": [WEATHER, ADD]}


def read(reader, text: str, rng: random.Random) -> tuple[str, list[tuple[int, str, object]]]:
    """Text and calls of an answer that comes in pieces of random length."""
    out, calls = "", []
    while text:
        size = rng.randint(1, 6)
        more, found = reader.push(text[:size])
        out, calls, text = out + more, calls + found, text[size:]
    more, found = reader.finish()
    return out + more, [(c.index, c.name, json.loads(c.arguments)) for c in calls + found]


ONE = '{"name": "weather", "arguments": {"city": "</Rome>"}}'
TWO = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "expected", "calls"),
    [
        ("plain <text> < tool_call", "plain <text> < tool_call", []),
        (f"<tool_call>\n{ONE}\n</tool_call>", "", ["weather"]),
        (f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "Let me see.", ["weather", "add"]),
        (f"<tool_call>{ONE}", "", ["weather"]),
        ("<tool_call>{broken</tool_call> on", "<tool_call>{broken</tool_call> on", []),
        ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        ("ends with <tool_c", "ends with <tool_c", []),
    ],
)
def test_marked_calls(text, expected, calls):
    for seed in range(20):
        out, found = read(MarkedReader(NAMES), text, random.Random(seed))
        assert out.rstrip() == expected
        assert [(index, name) for index, name, _ in found] == list(enumerate(calls))


@pytest.mark.parametrize(
    ("text", "expected", "calls"),
    [
        ("plain", "plain", []),
        (f" {ONE}", "", ["weather"]),
        (f"[{ONE}, {TWO}]", "", ["weather", "add"]),
        ('{"name": "other"}', '{"name": "other"}', []),
        (f"{ONE} and more", f"{ONE} and more", []),
        ("[" * 5000, "[" * 5000, []),
    ],
)
def test_bare_calls(text, expected, calls):
    for seed in range(20):
        out, found = read(BareReader(NAMES), text, random.Random(seed))
        assert out == expected
        assert [(index, name) for index, name, _ in found] == list(enumerate(calls))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made(client, choice):
    options = {"model": MODEL, **CHAT, "tool_choice": choice, "seed": 1, "temperature": 0.1, "max_tokens": 2000}
    answer = client.chat.completions.create(**options).choices[0]
    assert answer.finish_reason in ("tool_calls", "length")
    if answer.finish_reason == "length":  # the arguments of `add` have no end to speak of
        assert choice == "required"
        return
    call = answer.message.tool_calls[0]
    assert answer.message.content is None
    assert call.function.name in NAMES
    stream = list(client.chat.completions.create(**options, stream=True))
    calls = [c for chunk in stream for c in chunk.choices[0].delta.tool_calls or []]
    assert [c.function.arguments for c in calls] == [call.function.arguments]
    assert stream[-1].choices[0].finish_reason == "tool_calls"
    if choice != "required":
        assert json.loads(call.function.arguments)["city"] in ("Rome", "東京")
    later = [*CHAT["messages"], answer.message, {"role": "user", "content": "20 degrees"}]
    assert client.chat.completions.create(model=MODEL, messages=later, max_tokens=3).choices[0].finish_reason


def test_text_without_a_call_stays_text(client):
    options = {"model": MODEL, "messages": CHAT["messages"], "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**options, tools=[ADD], tool_choice="none").choices[0].message
    assert plain.content == client.chat.completions.create(**options).choices[0].message.content
    auto = client.chat.completions.create(**options, tools=[ADD]).choices[0].message
    stream = client.chat.completions.create(**options, tools=[ADD], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == auto.content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools": None, "tool_choice": "required"}, ["needs tools"]),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, ["not in tools"]),
        ({"tool_choice": "perhaps"}, ["tool_choice"]),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, ["exclude"]),
        ({"tools": [{"type": "search"}]}, ["tools"]),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}], "tool_choice": "required"},
         ["wrong"]),
    ],
)  # fmt: skip
def test_refusals(server, change, words):
    refuse(server.post("/v1/chat/completions", {**CHAT, **change}), 400, *words)
