"""Bodies that nobody has thought of: whatever the fields hold, the answer is an answer or a 4xx in OpenAI's form."""

from __future__ import annotations

import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PATHS = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def fields(server) -> dict[str, list[str]]:
    """The fields of every path's body, as the OpenAPI page has them."""
    page = server.http.get("/openapi.json").json()
    schemas = page["components"]["schemas"]

    def of(path: str) -> list[str]:
        name = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        return sorted(schemas[name.rsplit("/", 1)[1]]["properties"])

    return {path: of(path) for path in PATHS}


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_body_is_answered_or_refused(server, fields, data):
    path = data.draw(st.sampled_from(sorted(PATHS)))
    names = st.sampled_from(fields[path]) | st.text(string.ascii_lowercase, min_size=1, max_size=6)
    body = PATHS[path] | data.draw(st.dictionaries(names, JSON, max_size=3))
    if path.startswith("/v1") and isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 5)  # an answer takes its time
    answer = server.post(path, body)
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 400, (body, error)
    assert server.http.get("/health").status_code == 200


def test_the_server_is_as_it_was(server):
    server.wait_until_idle()
    assert server.complete(prompt="ab", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
