"""What clients get wrong is a 4xx in OpenAI's form that names the parameter, and the server goes on."""

from __future__ import annotations

import json
import socket

import httpx
import openai
import pytest

from tests.runtime.server.conftest import MODEL

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}
ENDLESS = {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}
TEXT = {"prompt": "x", "max_tokens": 2}


def refuse(answer, status: int, *words: str) -> dict:
    """The error of an answer, which is one line and says what it should."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and len(error["message"]) < 400
    for word in words:
        assert word in error["message"], error
    return error


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"max_tokens": -1}, "max_tokens", ["-1"]),
        ({"max_tokens": "5"}, "max_tokens", ["integer"]),
        ({"max_tokens": 1e9}, "max_tokens", []),
        ({"max_tokens": 10**9}, "max_tokens", ["1000000000", "32768"]),
        ({"max_tokens": 10**30}, "max_tokens", []),
        ({"max_tokens": True}, "max_tokens", ["integer"]),
        ({"prompt": None}, "prompt", ["missing"]),
        ({"prompt": ""}, "prompt", ["no tokens"]),
        ({"prompt": []}, "prompt", ["not empty"]),
        ({"prompt": [""]}, "prompt", ["no tokens"]),
        ({"prompt": [[]]}, "prompt", ["no tokens"]),
        ({"prompt": [1, "a"]}, "prompt", ["not"]),
        ({"prompt": [[1], [1.5]]}, "prompt", ["not"]),
        ({"prompt": {"a": 1}}, "prompt", ["not"]),
        ({"prompt": [0, 320]}, "prompt", ["320", "319"]),
        ({"prompt": [-1]}, "prompt", ["-1"]),
        ({"prompt": [10**40]}, "prompt", ["319"]),
        ({"prompt": "x" * 40000}, "prompt", ["40000", "32768"]),
        ({"prompt": "x" * 32767}, "max_tokens", ["32767", "32768"]),
        ({"prompt": [1] * 32768}, "prompt", ["32768 prompt tokens leave no room"]),
        ({"temperature": -1}, "temperature", ["-1"]),
        ({"temperature": "hot"}, "temperature", ["number"]),
        ({"top_p": 0}, "top_p", ["0"]),
        ({"top_p": 1.1}, "top_p", ["1.1"]),
        ({"top_k": -2}, "top_k", ["the model's own, else 0"]),
        ({"min_p": 2}, "min_p", []),
        ({"n": 0}, "n", ["1 to 16"]),
        ({"n": 17}, "n", ["1 to 16"]),
        ({"n": 10**25}, "n", ["1 to 16"]),
        ({"seed": 2**70}, "seed", []),
        ({"stop": ""}, "stop", ["empty"]),
        ({"stop": ["a", ""]}, "stop", ["empty"]),
        ({"stop": ["a"] * 17}, "stop", ["17", "16"]),
        ({"stop": "a" * 2000}, "stop", ["1024"]),
        ({"stop": [1]}, "stop", []),
        ({"stop": "\ud800"}, "stop", ["surrogate"]),
        ({"logprobs": 21}, "logprobs", ["21", "20"]),
        ({"logprobs": -1}, "logprobs", []),
        ({"logprobs": True}, "logprobs", []),
        ({"presence_penalty": 3}, "presence_penalty", []),
        ({"frequency_penalty": -3}, "frequency_penalty", []),
        ({"repetition_penalty": 0}, "repetition_penalty", []),
        ({"logit_bias": {"320": 1}}, "logit_bias", ["320"]),
        ({"logit_bias": {"a": 1}}, "logit_bias", ["ids"]),
        ({"logit_bias": {"05": 1}}, "logit_bias", ["ids"]),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", ["ids"]),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias", ["ids"]),
        ({"logit_bias": {"1": 101}}, "logit_bias", ["101"]),
        ({"stop_token_ids": [320]}, "stop_token_ids", ["320"]),
        ({"stream": "yes"}, "stream", ["boolean"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream: true"]),
        ({"stream_options": {}, "max_tokens": 0}, "stream_options", ["stream: true"]),
        ({"best_of": 2}, "best_of", ["unknown parameter 'best_of'"]),
        ({"suffix": "x"}, "suffix", ["unknown"]),
        ({"nonsense": 1}, "nonsense", ["unknown"]),
        ({"\ud800": 1}, None, []),
        ({"prompt": "\ud800"}, None, []),
    ],
)  # fmt: skip
def test_completion_parameters(server, change, param, words):
    answer = server.http.post("/v1/completions", content=json.dumps({**TEXT, **change}), headers=JSON)
    error = refuse(answer, 400, *words)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, ["no message"]),
        ({"messages": None}, ["messages"]),
        ({"messages": "hi"}, ["messages"]),
        ({"messages": [{"content": "x"}]}, ["role"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["only user/assistant"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, ["image_url"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["content"]),
        ({"messages": [{"role": "user"}]}, ["messages.0.content is missing"]),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}, ["messages.1.content is missing"]),
        ({"messages": [{"role": "assistant", "refusal": None}]}, ["messages.0.content is missing"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, ["string as 'text'"]),
        ({"messages": [{"role": "system", "content": None}]}, ["messages.0.content is missing"]),
        ({"max_tokens": 0}, ["max_tokens", "1 or more"]),
        ({"max_tokens": None, "max_completion_tokens": -2}, ["max_completion_tokens"]),
        ({"max_completion_tokens": 7}, ["differ"]),
        ({"logprobs": 5}, ["logprobs"]),
        ({"top_logprobs": 3}, ["logprobs: true"]),
        ({"logprobs": True, "top_logprobs": 21}, ["top_logprobs is 21", "20"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}}, ["satisfies"]),
        ({"modalities": ["audio"]}, ["unknown parameter 'modalities'"]),
        ({"chat_template_kwargs": {"messages": []}}, ["messages"]),
        ({"prompt": "x"}, ["unknown parameter 'prompt'"]),
    ],
)  # fmt: skip
def test_chat_parameters(server, change, words):
    refuse(server.post("/v1/chat/completions", {**CHAT, **change}), 400, *words)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}',
        b'{"max_tokens": 1e999, "prompt": "x"}', b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(server, body):
    answer = server.http.post("/v1/completions", content=body, headers=JSON)
    refuse(answer, 400)
    refuse(server.http.post("/v1/completions", content=body), 400, "Content-Type: application/json")


def test_paths_methods_models(server, client):
    refuse(server.http.get("/nowhere"), 404, "nowhere")
    refuse(server.http.get("/v1/completions"), 405, "GET")
    refuse(server.http.get("/v1/models/other"), 404, "other")
    error = refuse(server.post("/v1/completions", {**TEXT, "model": "other"}), 404, "'other'", MODEL)
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_a_body_that_is_too_large(server):
    refuse(server.http.post("/v1/completions", content=b"x" * (9 << 20)), 413, "8388608")


def test_tokenize_and_detokenize(server):
    refuse(server.post("/tokenize", {}), 400, "prompt")
    refuse(server.post("/tokenize", {"prompt": "x", "messages": []}), 400, "one of")
    refuse(server.post("/tokenize", {"prompt": "x", "speed": 1}), 400, "unknown")
    refuse(server.post("/detokenize", {"tokens": [320]}), 400, "319")
    refuse(server.post("/detokenize", {"tokens": ["a"]}), 400, "tokens")
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_the_server_goes_on(server):
    assert server.complete(**TEXT)["usage"]["completion_tokens"] == 2
    server.wait_until_idle()


@pytest.mark.parametrize("head", ["Content-Length: 1000000000000", "Content-Length: 9000000\r\nExpect: 100-continue"])
def test_a_body_that_is_announced_as_too_large(server, head):
    """Refused before any of it has come."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 0), 20) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"}}"):
            part = connection.recv(1 << 16)
            assert part, answer
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ") and b"8388608" in answer and b"100 Continue" not in answer


def test_a_body_that_turns_out_too_large(server):
    """Without an announcement; whoever looks for the answer only when all is sent finds it."""
    parts = (b"x" * (1 << 20) for _ in range(20))
    refuse(server.http.post("/v1/completions", content=parts), 413, "8388608")


def test_text_that_cannot_fit_is_not_tokenised(server):
    """A vocabulary of bytes and words of 13 letters at most: two million characters are more than 32768 tokens."""
    text = "\u00e9" * 2_000_000
    said = ["2000000 characters are at least", "32768 tokens"]
    assert refuse(server.post("/v1/completions", {"prompt": text}), 400, *said)["param"] == "prompt"
    messages = [{"role": "user", "content": text}]
    assert refuse(server.post("/v1/chat/completions", {"messages": messages}), 400, "characters")["param"] == "messages"
    refuse(server.post("/tokenize", {"prompt": text}), 400, *said)
    refuse(server.post("/v1/completions", {"prompt": ["x"] * 100_000}), 400, "100000 prompts")
