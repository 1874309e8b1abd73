"""The files of a batch: what lines mean, what is refused and how, and what a rerun makes of results that are there."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from mgtp.runtime.offline.request_file import Line, OfflineModel, RequestFile
from mgtp.runtime.offline.result_file import InOrder, ResultFile, openai_result, plain_result
from mgtp.shardplan.errors import MgtpError, UsageError
from mgtp.shardplan.shard_set import ShardSet

CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
HELLO = [{"role": "user", "content": "hello"}]


NULLS = dict.fromkeys(("seed", "logprobs", "max_tokens", "functions"))


@pytest.fixture(scope="module")
def model(tiny_checkpoint, sharded):
    shard_set = ShardSet.open(Path(sharded(tiny_checkpoint("base"), 2)))
    model = OfflineModel("tiny", shard_set, 0)
    model.context = 256
    return model


@pytest.fixture
def read(model, tmp_path):
    """A function that writes lines to a file and reads them as requests."""

    def read(*lines, **defaults) -> RequestFile:
        path = tmp_path / "in.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return RequestFile(path, model, defaults)

    return read


def request_of(requests: RequestFile, index: int = 0):
    return requests.task(requests.lines[index]).asked.answers[0].request


def test_forms_of_a_line_mean_the_same(read):
    forms = [
        {"id": 1, "messages": HELLO, "max_tokens": 7, "seed": 3, "logprobs": 2, "prompt": None},
        CHAT | {"body": {"messages": HELLO, "max_tokens": 7, "seed": 3, "logprobs": True, "top_logprobs": 2}},
        CHAT | {"custom_id": 2, "body": {"messages": HELLO, "max_completion_tokens": 7, "model": "tiny"} | NULLS},
    ]
    with read(*forms, seed=3, logprobs=2, max_tokens=99) as requests:
        asked = [request_of(requests, i) for i in range(3)]
        assert all((a.prompt_ids, a.sampling) == (asked[0].prompt_ids, asked[0].sampling) for a in asked)
        assert asked[0].prompt_ids[:2] == [256, 258]
        assert [line.key for line in requests.lines] == ["1", "c", "2"]


def test_defaults_give_way_to_the_line(read):
    with read({"prompt": "abc", "temperature": 0}, {"prompt": "abc"}, temperature=0.5, stop=["x"]) as requests:
        assert [request_of(requests, i).sampling.temperature for i in (0, 1)] == [0, 0.5]
        # Nobody says how many tokens: what is left of the context, at most 512.
        assert [line.longest for line in requests.lines] == [256, 256]
        assert [line.needed for line in requests.lines] == [4, 4]


def test_empty_lines_and_a_byte_order_mark_are_passed_over(read, tmp_path, model):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt_ids": [1]}')
    with RequestFile(tmp_path / "in.jsonl", model, {}) as requests:
        assert [(line.number, line.key) for line in requests.lines] == [(1, "1"), (4, "4")]
        assert request_of(requests, 1).prompt_ids == [1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ({}, "prompt, prompt_ids, messages"),
        ({"prompt": "a", "prompt_ids": [1]}, "prompt and prompt_ids"),
        ({"prompt": ["a", "b"]}, "its own line"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt_ids": [1, 320]}, "320"),
        ({"prompt_ids": [1.5]}, "token ids"),
        ({"prompt": "x" * 300}, "256"),
        ({"prompt": "x", "max_tokens": 256}, "256 to generate"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "-1"),
        ({"prompt": "x", "n": 2}, "'n'"),
        ({"prompt": "x", "id": ""}, "id must be"),
        ({"prompt": "x", "id": 1}, "that of line 1"),
        ({"messages": "x"}, "messages"),
        (CHAT | {"body": {"messages": HELLO, "stream": True}}, "stream"),
        (CHAT | {"body": {"messages": HELLO, "modell": "x"}}, "'modell'"),
        (CHAT | {"body": {"messages": HELLO, "model": "gpt"}}, "'gpt'"),
        (CHAT | {"body": []}, "body"),
        (CHAT | {"url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
        (CHAT | {"method": "GET", "body": {}}, "GET"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}, "extra": 1}, "'extra'"),
    ],
)
def test_a_bad_line_is_named(read, line, words):
    with pytest.raises(UsageError) as refused:
        read({"prompt": "fine"}, line)
    assert "in.jsonl line 2: " in refused.value.message
    assert words in refused.value.message
    assert "\n" not in refused.value.message


def test_a_file_without_requests(read, model, tmp_path):
    with pytest.raises(UsageError, match="no requests"):
        read("", "  ")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="not a file"):
            RequestFile(path, model, {})


def test_a_file_that_changes_is_noticed(read, tmp_path):
    with read({"prompt": "abc"}, {"prompt": "abd"}) as requests:
        text = (tmp_path / "in.jsonl").read_text()
        (tmp_path / "in.jsonl").write_text(text.replace("abd", "abx"))
        requests.task(requests.lines[0])
        with pytest.raises(UsageError, match="line 2 has changed"):
            requests.task(requests.lines[1])


LINES = [Line(n, 0, key, f"digest-{key}", 1, 1) for n, key in enumerate("abc", 1)]


def result(key: str) -> dict:
    return plain_result(key, f"digest-{key}", {"text": key})


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def test_results_are_found_again_and_a_cut_off_one_is_dropped(out):
    with ResultFile(out, LINES, ordered=True) as results:
        results.write(result("a"), failed=False)
        results.write(openai_result("b", "digest-b", None, "no"), failed=True)
    whole = out.read_bytes()
    for cut in (b"", b"{", json.dumps(result("c")).encode()):
        out.write_bytes(whole + cut)
        with ResultFile(out, LINES, ordered=True) as results:
            assert results.done == {"a", "b"}
            assert results.num_failed == 1
            results.write(result("c"), failed=False)
        assert [json.loads(line).get("id") for line in out.read_text().splitlines()][2:] == ["c"]


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[]",
        '{"id": "a"}',
        json.dumps(result("d")),  # nobody has asked
        json.dumps(plain_result("a", "digest-of-another-prompt", {})),
    ],
)
def test_what_is_no_result_of_this_batch_is_refused_and_kept(line, out):
    out.write_text(line + "\n")
    with pytest.raises(UsageError, match="line 1 is no result of this batch"):
        ResultFile(out, LINES, ordered=False)
    assert out.read_text() == line + "\n"


def test_a_full_disk_names_the_file_and_loses_nothing(out):
    """The second result fits in part only; the error named no file, and the first thing to try was to search for it."""
    line = len(json.dumps(result("a"), separators=(",", ":"))) + 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultFile(out, LINES, ordered=True) as results:
        results.write(result("a"), failed=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (line + 5, before[1]))
        try:
            with pytest.raises(MgtpError, match=f"--output {out}: File too large"):
                results.write(result("b"), failed=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.stat().st_size == line + 5
    with ResultFile(out, LINES, ordered=True) as results:
        assert results.done == {"a"}
        results.write(result("b"), failed=False)
    assert [json.loads(text)["id"] for text in out.read_text().splitlines()] == ["a", "b"]


def test_order_is_kept_or_refused(out):
    with ResultFile(out, LINES, ordered=False) as results:
        results.write(result("b"), failed=False)
    with pytest.raises(UsageError, match="out of order"):
        ResultFile(out, LINES, ordered=True)
    with ResultFile(out, LINES, ordered=False) as results:
        assert results.done == {"b"}


def test_two_runs_do_not_write_one_file(out):
    with ResultFile(out, LINES, ordered=True), pytest.raises(UsageError, match="another run"):
        ResultFile(out, LINES, ordered=True)


def test_in_order():
    order = InOrder("abcd")
    assert [order.push(key, key.upper()) for key in "bdac"] == [[], [], ["A", "B"], ["C", "D"]]
