"""The loop of a batch with ranks that a test speaks for: failures, stop strings, order, how many at once."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgtp.runtime.messages import Abort, Request, RequestFailed, TokenOutput, Tokens
from mgtp.runtime.offline.request_file import OfflineModel, RequestFile
from mgtp.runtime.offline.result_file import ResultFile
from mgtp.runtime.offline.run import OfflineRun
from mgtp.shardplan.errors import UsageError
from mgtp.shardplan.shard_set import ShardSet


class EchoRanks:
    """Answers every request with its own prompt, a token a step, the last to come first; prompts with a 9 fail."""

    def __init__(self) -> None:
        self.open: deque[tuple[Request, int]] = deque()
        self.aborted: list[str] = []
        self.most = 0

    def send(self, message: Request | Abort) -> None:
        if isinstance(message, Abort):
            self.aborted.append(message.id)
            self.open = deque(entry for entry in self.open if entry[0].id != message.id)
        else:
            self.open.append((message, 0))
            self.most = max(self.most, len(self.open))

    def receive_step(self) -> Tokens | RequestFailed:
        request, given = self.open.pop()
        if 9 in request.prompt_ids:
            return RequestFailed(request.id, "not finite")
        is_last = given + 1 == len(request.prompt_ids)
        if not is_last:
            self.open.append((request, given + 1))
        return Tokens([TokenOutput(request.id, request.prompt_ids[given], "length" if is_last else None)])


@pytest.fixture
def run(tiny_checkpoint, sharded, tmp_path):
    """A function that runs lines through EchoRanks: (results, summary, ranks)."""

    def run(*lines, ordered=True, context=256, **defaults):
        shard_set = ShardSet.open(Path(sharded(tiny_checkpoint("base"), 2)))
        model = OfflineModel("tiny", shard_set, 0)
        model.context = 256
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ranks, out = EchoRanks(), tmp_path / "out.jsonl"
        started = SimpleNamespace(group=ranks, ready=[SimpleNamespace(max_model_len=context)])
        with (
            RequestFile(tmp_path / "in.jsonl", model, defaults) as requests,
            ResultFile(out, requests.lines, ordered=ordered) as results,
        ):
            batch = OfflineRun(started, requests, results, max_num_seqs=2, ordered=ordered)  # type: ignore[arg-type]
            summary = batch.run(lambda done, tokens: None)
        return [json.loads(line) for line in out.read_text().splitlines()], summary, ranks

    return run


def test_order_and_room(run):
    """Every answer is complete before the next begins, the last first: in the file they are in order, or not."""
    lines = [{"id": str(n), "prompt": "ab" * n, "max_tokens": 99} for n in range(1, 8)]
    results, summary, ranks = run(*lines)
    assert [r["id"] for r in results] == [line["id"] for line in lines]
    assert [r["text"] for r in results] == [line["prompt"] for line in lines]
    assert ranks.most == 4
    assert (summary.requests, summary.completion_tokens, summary.failed) == (7, 56, 0)
    results, summary, _ = run(*lines)
    assert (len(results), summary.skipped, summary.completion_tokens) == (7, 7, 0)


def test_unordered_results_come_as_they_finish(run):
    results, _, _ = run(*[{"id": str(n), "prompt": "ab"} for n in range(4)], ordered=False)
    assert [r["id"] for r in results] == ["3", "2", "1", "0"]


def test_a_request_that_fails_is_a_result_and_the_others_go_on(run):
    body = {"prompt": [[5, 6], [9], [7]], "max_tokens": 4}
    openai = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    results, summary, ranks = run({"prompt_ids": [9, 1]}, openai, {"prompt": "ok"})
    assert results[0]["error"] == {"message": "not finite"}
    assert results[1]["error"]["message"] == "not finite" and results[1]["response"] is None
    assert results[2]["text"] == "ok"
    assert summary.failed == 2
    assert not ranks.open
    assert len(ranks.aborted) == 3


def test_a_stop_string_ends_the_sequence(run):
    results, _, ranks = run({"prompt": "one two three", "stop": " th"})
    assert (results[0]["text"], results[0]["finish_reason"]) == ("one two", "stop")
    assert len(ranks.aborted) == 1


def test_openai_results_hold_the_answer(run):
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 5, "echo": True}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    results, _, _ = run(line, {**line, "custom_id": "y", "body": {**body, "max_tokens": 0}})
    answers = [r["response"]["body"] for r in results]
    assert [c["text"] for c in answers[0]["choices"]] == ["abab", "abab", "cc", "cc"]
    assert [c["text"] for c in answers[1]["choices"]] == ["ab", "ab", "c", "c"]
    assert answers[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert {c["finish_reason"] for a in answers for c in a["choices"]} == {"length"}


def test_a_context_that_is_smaller_than_the_model_says(run):
    with pytest.raises(UsageError, match=r"line 2 needs a context of 101 tokens, there is memory for 64"):
        run({"prompt": "ok"}, {"prompt": "x", "max_tokens": 100}, context=64)
