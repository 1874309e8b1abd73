"""Log-probabilities over HTTP are those of transformers' forward pass, of the answer and of the prompt."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runtime.server.conftest import MODEL

PROMPT = "The quick brown fox, hé"


@pytest.fixture(scope="module")
def log_softmax(served_checkpoint):
    """A function of ids: [T, V] log-probabilities of the token after each of them, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(served_checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def log_softmax(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

    return log_softmax


def ids_of(server, text: str) -> list[int]:
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def check(found: dict, ids: list[int], first: int, expected: torch.Tensor, k: int) -> None:
    """A completion's logprobs against those of tokens ids[first:]; a prompt's first token has none."""
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(ids) - first
    for at, (value, top) in enumerate(zip(found["token_logprobs"], found["top_logprobs"], strict=True), first):
        if at == 0:
            assert value is None and top is None
            continue
        assert value == pytest.approx(float(expected[at - 1, ids[at]]), abs=1e-4)
        likeliest = expected[at - 1].topk(k).values.tolist()
        assert sorted(top.values(), reverse=True)[:k] == pytest.approx(likeliest, abs=1e-4)


def test_of_a_completion(server, log_softmax):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.5, "seed": 4, "frequency_penalty": 1, "logprobs": 4}
    choice = server.complete(**body, ignore_eos=True, return_token_ids=True)["choices"][0]
    prompt = choice["prompt_token_ids"]
    ids = prompt + choice["token_ids"]
    check(choice["logprobs"], ids, len(prompt), log_softmax(ids), 4)


def test_of_a_chat(server, log_softmax):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    body |= {"temperature": 1, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    prompt = choice["prompt_token_ids"]
    expected = log_softmax(prompt + choice["token_ids"])
    for at, token in enumerate(choice["logprobs"]["content"], len(prompt)):
        token_id = choice["token_ids"][at - len(prompt)]
        assert token["logprob"] == pytest.approx(float(expected[at - 1, token_id]), abs=1e-4)
        likeliest = expected[at - 1].topk(3).values.tolist()
        assert [top["logprob"] for top in token["top_logprobs"]] == pytest.approx(likeliest, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("prompt", [PROMPT, [256, 5, 300, 7], [88]])
def test_echo_scores_the_prompt(server, log_softmax, prompt, max_tokens):
    """As evaluation harnesses ask for it, with max_tokens 0 or 1; also a second time, when its blocks are cached."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 2}
    body |= {"ignore_eos": True, "return_token_ids": True}
    plain = server.complete(**{**body, "logprobs": None})
    streamed = "".join(event["choices"][0]["text"] for event in server.events("/v1/completions", body))
    assert streamed == plain["choices"][0]["text"]
    for _ in range(2):
        answer = server.complete(**body)
        choice = answer["choices"][0]
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        check(choice["logprobs"], ids, 0, log_softmax(ids), 2)
        assert choice["text"] == plain["choices"][0]["text"]
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == max_tokens == answer["usage"]["completion_tokens"]
        assert answer["usage"] == plain["usage"]


def test_echo_scores_several_prompts_with_several_answers(client, server, log_softmax):
    options = {
        "model": MODEL,
        "prompt": ["ab", PROMPT],
        "n": 2,
        "max_tokens": 3,
        "seed": 3,
        "echo": True,
        "logprobs": 1,
    }
    whole = client.completions.create(**options, extra_body={"ignore_eos": True, "return_token_ids": True})
    for choice in whole.choices:
        ids = choice.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
        check(choice.logprobs.model_dump(), ids, 0, log_softmax(ids), 1)
        offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens
        prompt = options["prompt"][choice.index // 2]
        assert choice.text.startswith(prompt)
        # é is two tokens, both at its place.
        assert [prompt[offset] for offset in offsets[: len(prompt)]] == list(prompt)
        assert tokens[: len("ab")] == list(prompt[:2])
    texts, values = [""] * 4, [[] for _ in range(4)]
    for chunk in client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}):
        part = chunk.choices[0]
        texts[part.index] += part.text
        values[part.index] += part.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    # Which tokens share a step is a matter of time, and with it the last bits.
    for streamed, choice in zip(values, whole.choices, strict=True):
        assert streamed[0] is None
        assert streamed[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_long_prompts_are_scored_in_pieces(server, log_softmax):
    """Longer than a step scores at once, beside another answer; one that fills the context has no room for more."""
    ids = [(7 * i * i + 3 * i) % 250 for i in range(700)]
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "y", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    ):
        choice = server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    expected = log_softmax(ids)
    right = [float(expected[at - 1, ids[at]]) for at in range(1, 700)]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(right, abs=1e-4)
    assert choice["logprobs"]["token_logprobs"][0] is None
    server.wait_until_idle()
