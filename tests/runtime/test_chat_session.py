"""`mgtp chat` with servers of others, and with those that break off: one line, and never half an answer for a whole one."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from mgtp.runtime.chat_session import Conversation, RemoteAnswers
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
