"""response_format: the answer follows the schema whatever the model would rather say."""

from __future__ import annotations

import json

import pytest

from tests.runtime.server.conftest import MODEL
from tests.runtime.server.test_refusals import refuse

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}


def schema_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_schema(client, temperature):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], response_format=schema_format(SCHEMA), seed=1,
        temperature=temperature, max_tokens=400,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    document = json.loads(answer.choices[0].message.content)
    assert set(document) == {"name", "size", "ok"}
    assert document["size"] in (1, 2) and isinstance(document["ok"], bool) and len(document["name"]) <= 5


def test_whole_characters(server):
    """An emoji is four tokens here: a stream has it once and whole; cut in its middle it is one U+FFFD."""
    body = {"prompt": "x", "max_tokens": 50, "response_format": schema_format({"const": "a😀b"})}
    events = server.events("/v1/completions", body)
    texts = [e["choices"][0]["text"] for e in events]
    assert "".join(texts) == '"a😀b"'
    assert any("😀" in text for text in texts)
    for count in (3, 4, 5):
        cut = {**body, "max_tokens": count}
        assert server.complete(**cut)["choices"][0]["text"] == '"a\ufffd'
        assert "".join(e["choices"][0]["text"] for e in server.events("/v1/completions", cut)) == '"a\ufffd'
    assert server.complete(**body, stop="😀")["choices"][0] | {"logprobs": None} == {
        "index": 0, "text": '"a', "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip


def test_other_requests_are_not_bound(server):
    """In one batch: several answers in a form beside free ones."""
    free = server.complete(prompt="x", max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True},
    ) as stream:
        lines = stream.iter_lines()
        text = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        bound = server.complete(prompt="x", n=3, max_tokens=50, response_format=schema_format({"enum": ["yes", "no"]}))
        for line in lines:
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert all(json.loads(c["text"]) in ("yes", "no") for c in bound["choices"])
    assert text.startswith(free)


def test_json_object_begins_as_an_object(server):
    answer = server.complete(prompt="x", max_tokens=5, response_format={"type": "json_object"})
    assert answer["choices"][0]["text"].lstrip().startswith("{")
    plain = {"prompt": "x", "max_tokens": 5, "temperature": 0}
    assert (
        server.complete(**plain, response_format={"type": "text"})["choices"][0]["text"]
        == (server.complete(**plain)["choices"][0]["text"])
    )


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_schema"}, ["json_schema.schema"]),
        ({"type": "grammar"}, ["response_format"]),
        (schema_format({"type": "wrong"}), ["wrong"]),
        (schema_format({"$ref": "#/nowhere"}), ["nowhere"]),
        (schema_format([]), ["schema"]),
    ],
)
def test_refused_formats(server, form, words):
    refuse(server.post("/v1/completions", {"prompt": "x", "response_format": form}), 400, *words)
    server.wait_until_idle()
