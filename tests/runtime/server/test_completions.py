"""/v1/completions and /v1/chat/completions with OpenAI's own client: every parameter, streamed and not."""

from __future__ import annotations

import math

import pytest

from tests.runtime.server.conftest import MODEL

GREEDY = {"model": MODEL, "temperature": 0}


def completion_text(stream) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def chat_text(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_ids_are_those_of_the_reference(server, reference):
    prompt, greedy = reference
    answer = server.complete(prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == greedy
    assert answer["choices"][0]["prompt_token_ids"] == prompt
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 40, "completion_tokens": 24, "total_tokens": 64}
    assert answer["model"] == MODEL


@pytest.mark.parametrize("seed", range(4))
def test_streamed_pieces_joined_are_the_answer(client, seed):
    """Random bytes: characters are cut everywhere."""
    options = {"model": MODEL, "prompt": "x", "max_tokens": 60, "seed": seed, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options).choices[0]
    stream = list(client.completions.create(**options, stream=True))
    assert completion_text(stream) == whole.text
    assert stream[-1].choices[0].finish_reason == whole.finish_reason == "length"


def test_chat(client, server):
    messages = [{"role": "user", "content": "hello"}]
    options = {**GREEDY, "messages": messages, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == 12
    # BOS once, from the template: <s> <|user|> hello </s> <|assistant|>
    tokens = server.post("/tokenize", {"messages": messages}).json()
    assert tokens["tokens"][:2] == [256, 258]
    assert whole.usage.prompt_tokens == tokens["count"] == 9
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chat_text(stream) == whole.choices[0].message.content
    assert stream[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in stream[:-1]] == [None] * (len(stream) - 1)
    assert stream[-1].usage == whole.usage
    assert stream[-1].choices == []


def test_content_parts_are_text(client):
    def ask(content):
        return client.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": content}], max_completion_tokens=6
        )

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ask(parts).choices[0].message.content == ask("one\ntwo").choices[0].message.content


def test_prompt_forms(server):
    """Text, ids, and lists of both; every prompt of a list is answered as it is alone."""
    alone = [server.complete(prompt=p, max_tokens=6, temperature=0) for p in ("abc", "xyz")]
    texts = [a["choices"][0]["text"] for a in alone]
    ids = [server.post("/tokenize", {"prompt": p}).json()["tokens"] for p in ("abc", "xyz")]
    for prompt in (["abc", "xyz"], ids, ["abc", ids[1]]):
        answer = server.complete(prompt=prompt, max_tokens=6, temperature=0)
        assert [c["text"] for c in answer["choices"]] == texts
        assert answer["usage"]["prompt_tokens"] == 6
    assert server.complete(prompt=ids[0], max_tokens=6, temperature=0)["choices"][0]["text"] == texts[0]


def test_n_answers(client):
    options = {"model": MODEL, "prompt": ["a", "b"], "n": 3, "max_tokens": 8, "seed": 5, "temperature": 1.5}
    whole = client.completions.create(**options)
    assert [c.index for c in whole.choices] == list(range(6))
    assert len({c.text for c in whole.choices}) > 3
    texts = [""] * 6
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]
    assert client.completions.create(**{**options, "n": 1, "prompt": "a"}).choices[0].text == texts[0]


def test_seed(server):
    """The same seed gives the same text, also beside other requests; no seed gives another one each time."""

    def text(**options):
        return server.complete(prompt="x", max_tokens=16, temperature=1, **options)["choices"][0]["text"]

    first = text(seed=1)
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "y", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    ):
        assert text(seed=1) == first
    assert text(seed=2) != first
    assert text() != text()


@pytest.mark.parametrize("width", [1, 2, 5])
def test_stop_strings(client, width):
    """A stop string over several tokens is seen, and no part of it is let out in a stream."""
    options = {**GREEDY, "prompt": "stop", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**options).choices[0].text
    stop = text[9 : 9 + width]
    expected = text[: text.index(stop)]
    whole = client.completions.create(**options, stop=[stop, "never seen"]).choices[0]
    assert whole.text == expected
    assert whole.finish_reason == "stop"
    stream = list(client.completions.create(**options, stop=stop, stream=True, logprobs=0))
    assert completion_text(stream) == expected
    assert stream[-1].choices[0].finish_reason == "stop"
    offsets = [o for chunk in stream for o in chunk.choices[0].logprobs.text_offset]
    assert offsets == sorted(offsets)
    assert all(offset < len(expected) for offset in offsets)


def test_stop_token_ids_and_eos(server, reference):
    prompt, greedy = reference
    options = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    answer = server.complete(**options, stop_token_ids=[greedy[3]])["choices"][0]
    assert (answer["token_ids"], answer["finish_reason"]) == (greedy[:4], "stop")
    eos = {"257": 100}
    ended = server.complete(**options, logit_bias=eos)
    assert ended["choices"][0] | {"token_ids": 0, "prompt_token_ids": 0} == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "token_ids": 0, "prompt_token_ids": 0,
    }  # fmt: skip
    assert ended["usage"]["completion_tokens"] == 1
    going_on = server.complete(**options, logit_bias=eos, ignore_eos=True)["choices"][0]
    assert (going_on["token_ids"], going_on["finish_reason"]) == ([257] * 24, "length")


def test_penalties_and_bias(server):
    """A token that is preferred by 100 repeats for ever, unless a penalty makes others likelier."""

    def ids(**options):
        answer = server.complete(prompt="x", max_tokens=8, temperature=0, return_token_ids=True, **options)
        return answer["choices"][0]["token_ids"]

    assert ids(logit_bias={"65": 100}) == [65] * 8
    biased = {"65": 2.0, "66": 1.9}
    assert len(set(ids(logit_bias=biased, frequency_penalty=2))) > len(set(ids(logit_bias={"65": 100})))
    assert 65 not in ids(logit_bias={"65": -100})
    assert ids(presence_penalty=2) != ids(presence_penalty=-2)
    assert ids(repetition_penalty=1.5) != ids(repetition_penalty=0.1)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}])
def test_filters_that_leave_one_token_are_greedy(server, options):
    body = {"prompt": "x", "max_tokens": 10, "temperature": 1.0, "seed": 3}
    greedy = server.complete(**{**body, "temperature": 0})["choices"][0]["text"]
    assert server.complete(**{**body, **options})["choices"][0]["text"] == greedy
    assert server.complete(**body)["choices"][0]["text"] != greedy


def test_completion_logprobs(client):
    options = {**GREEDY, "prompt": "x", "max_tokens": 12, "logprobs": 5, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options).choices[0].logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.text_offset) == 12
    assert all(len(top) == 5 for top in whole.top_logprobs)  # tokens that read alike keep keys of their own
    for token, value, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert top[token] == value == max(top.values()) <= 0
    streamed = [c.choices[0].logprobs for c in client.completions.create(**options, stream=True)]
    assert [t for part in streamed for t in part.tokens] == whole.tokens
    assert [t for part in streamed for t in part.text_offset] == whole.text_offset


def test_chat_logprobs(client):
    options = {
        **GREEDY, "messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "logprobs": True, "top_logprobs": 5,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0]
    content = whole.logprobs.content
    assert len(content) == 12
    assert all(len(token.top_logprobs) == 5 for token in content)
    assert all(token.bytes is not None and token.logprob == token.top_logprobs[0].logprob for token in content)
    text = b"".join(bytes(token.bytes) for token in content if not token.token.startswith("<"))
    assert text.decode("utf-8", "replace") == whole.message.content
    assert sum(math.exp(top.logprob) for top in content[0].top_logprobs) < 1
    streamed = [c.choices[0].logprobs for c in client.chat.completions.create(**options, stream=True)]
    assert [t for part in streamed for t in part.content] == content
    options["top_logprobs"] = None
    assert client.chat.completions.create(**options).choices[0].logprobs.content[0].top_logprobs == []


def test_echo(client):
    options = {**GREEDY, "prompt": ["héé", "xyz"], "max_tokens": 5}
    plain = client.completions.create(**options)
    echoed = client.completions.create(**options, echo=True)
    assert [c.text for c in echoed.choices] == [
        p + c.text for p, c in zip(options["prompt"], plain.choices, strict=True)
    ]
    options["prompt"] = "xyz"
    assert completion_text(client.completions.create(**options, echo=True, stream=True)) == echoed.choices[1].text
    scored = client.completions.create(**{**options, "max_tokens": 0}, echo=True)
    assert scored.choices[0].text == "xyz"
    assert scored.usage.completion_tokens == 0


def test_parameters_that_clients_send_by_habit_change_nothing(client):
    options = {**GREEDY, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    plain = client.chat.completions.create(**options).choices[0].message.content
    habits = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    unset = dict.fromkeys(("functions", "reasoning_effort", "modalities", "tools", "seed"))
    answer = client.chat.completions.create(**options, **habits, extra_body=unset)
    assert answer.choices[0].message.content == plain


def test_models_and_tokens(client, server):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 32768
    tokens = server.post("/tokenize", {"prompt": "h😀"}).json()
    assert tokens == {"tokens": [71, 172, 253, 246, 222], "count": 5, "max_model_len": 32768}
    assert server.post("/detokenize", {"tokens": [256, *tokens["tokens"]]}).json() == {"prompt": "<s>h😀"}
