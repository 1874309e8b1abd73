"""Conversations: servers of others, answers that break off (one line, never half an answer for a whole one), or are stopped."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from mgtp.runtime.chat_session import Conversation, RemoteAnswers
from mgtp.runtime.launch.client import generate
from mgtp.runtime.messages import Abort, Request, RequestFailed, TokenOutput, Tokens
from mgtp.runtime.sampling_params import SamplingParams
from mgtp.runtime.text.tokenizer import Tokenizer
from mgtp.shardplan.errors import MgtpError

MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
HELLO = b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\n'


class Handler(http.server.BaseHTTPRequestHandler):
    models, events = MODELS, b""

    def do_GET(self) -> None:
        self._send(self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.events)

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) + content.endswith(b"...")))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_comments_and_other_fields_of_events_are_passed_over(url, monkeypatch):
    events = b": ping\n\nevent: x\nid: 1\n" + HELLO + b'data:{"choices": [{"delta": {}}], "usage": null}\n\n'
    monkeypatch.setattr(Handler, "events", events + b'data: {"choices": []}\n\ndata: [DONE]\n\n')
    conversation = Conversation(RemoteAnswers(f"{url}/v1/", None, {}))
    assert "".join(conversation.say("hi")) == "Hello"
    assert [m["content"] for m in conversation.messages] == ["hi", "Hello"]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (HELLO, "broke off: its end is missing"),
        (HELLO + b"...", "broke off"),
        (HELLO + b"data: xyz\n\n", "no OpenAI-compatible server"),
        (b'data: {"choices": 5}\n\n', "no OpenAI-compatible server"),
        (b"<html></html>", "its end is missing"),
        (b'data: {"error": "boom"}\n\n', ": boom"),
        (b'data: {"error": {"message": "bang"}}\n\n', ": bang"),
    ],
)
def test_answers_that_break_off_are_none(url, monkeypatch, events, words):
    monkeypatch.setattr(Handler, "events", events)
    conversation = Conversation(RemoteAnswers(url, None, {}))
    with pytest.raises(MgtpError) as error:
        list(conversation.say("hi"))
    assert error.value.message.startswith(url) and words in error.value.message
    assert conversation.messages == []


@pytest.mark.parametrize("models", [b"<html>", b"{}", b'{"data": [5]}', b'{"data": []}', b"", MODELS[:-9] + b"..."])
def test_what_is_no_server_is_said_so(url, monkeypatch, models):
    monkeypatch.setattr(Handler, "models", models)
    with pytest.raises(MgtpError) as error:
        RemoteAnswers(url, None, {})
    assert error.value.message.startswith(url) and error.value.hint


@pytest.mark.parametrize("address", ["http://", "http://[::1", "http://127.0.0.1:x"])
def test_addresses_that_cannot_be(address):
    with pytest.raises(MgtpError, match="does not answer"):
        RemoteAnswers(address, None, {})


class LateGroup:
    """Stands for ranks: each request gets three tokens, after what is left of the ones before."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.left: list[Any] = []

    def send(self, message: Request | Abort) -> None:
        self.sent.append(message)
        if isinstance(message, Request):
            ids = [(10 * len(self.sent) + i, "length" if i == 2 else None) for i in range(3)]
            self.left += [Tokens([TokenOutput(message.id, *token)]) for token in ids]
            self.left.append(RequestFailed(message.id, "too late to matter"))

    def receive_step(self) -> Any:
        return self.left.pop(0)


@pytest.mark.parametrize("taken", [1, 2])
def test_tokens_of_an_answer_that_was_stopped_reach_no_other(tiny_checkpoint, taken):
    group, tokenizer = LateGroup(), Tokenizer.load(tiny_checkpoint("base"), {})
    results = []
    for count in (taken, 3):
        pieces = generate(SimpleNamespace(group=group), tokenizer, [1], SamplingParams())  # type: ignore[arg-type]
        with closing(pieces):
            results.append([next(pieces) for _ in range(count)])
    first, abort, second = group.sent[:3]
    assert abort == Abort(first.id) and second.id != first.id
    assert results[1] == [tokenizer.decode([30 + i]) for i in range(3)], "those of the second request"


class Counting:
    """Answers with numbers."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        yield from "123"

    def check(self) -> None:
        """All is well."""


def test_what_was_said_of_an_answer_that_was_stopped_is_remembered():
    conversation = Conversation(Counting())
    for count, said in ((0, []), (2, ["hi", "12"]), (3, ["hi", "12", "hi", "123"])):
        pieces = conversation.say("hi")
        assert len([*islice(pieces, count)]) == count
        pieces.close()
        assert [m["content"] for m in conversation.messages] == said
