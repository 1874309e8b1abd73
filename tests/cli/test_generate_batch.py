"""`mgtp generate --prompts` as a shell sees it: results, interruption, refusals before anything is started."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.cli.test_generate import fail
from tests.processes import assert_nothing_left, mgtp, start
from tests.servers import wait_for


@pytest.fixture
def tmp_path():
    """Shorter than pytest's own: the paths of Unix sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        yield Path(folder)


@pytest.fixture
def batch(tmp_path, tiny_checkpoint, sharded):
    """A function that makes the arguments for a file with `lines`; its results are in tmp_path / out.jsonl.

    With one rank, since all this is the front's work and the leader's.
    """

    def batch(*lines, name="long32k", options=()) -> list[str]:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = ["--prompts", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        return ["generate", sharded(tiny_checkpoint(name), 1), *files, "--device", "cpu", *options]

    return batch


def results(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_an_interrupted_batch_goes_on(tmp_path, batch, tiny_checkpoint):
    """Each line is answered as it is alone, whatever ran beside it and however often the command was interrupted."""
    reference = json.loads((tiny_checkpoint("long32k") / "ref.json").read_text())
    known = {"prompt_ids": reference["prompt_ids"], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    mixed = [{"prompt": f"line {n}", "max_tokens": 5 + n % 3, "seed": n, "logprobs": 1} for n in range(10)]
    endless = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True}
    arguments = batch(known, *mixed, endless, options=("--temperature", "0.7", "--max-num-seqs", "4", "--json"))
    run = start(tmp_path, *arguments)
    wait_for(lambda: ((tmp_path / "out.jsonl").exists() and len(results(tmp_path)) >= 5) or None, 60, run)
    os.kill(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 130 and out == "" and "goes on from there" in err
    assert err.endswith("\nerror: interrupted\n")
    assert_nothing_left(tmp_path)

    with (tmp_path / "out.jsonl").open("rb+") as file:  # as after a crash in the middle of a line
        file.truncate((tmp_path / "out.jsonl").stat().st_size - 10)
    second = batch(known, *mixed, {**endless, "max_tokens": 3}, options=arguments[-5:])
    summary = json.loads(mgtp(tmp_path, *second).out)
    assert summary["requests"] == 12 and 4 <= summary["skipped"] <= 10 and summary["failed"] == 0
    found = results(tmp_path)
    assert [r["id"] for r in found] == list(range(1, 13))
    assert found[0]["token_ids"] == reference["greedy_ids"]

    again = batch(*reversed(mixed), options=("--temperature", "0.7", "--max-num-seqs", "2", "--unordered"))
    (tmp_path / "out.jsonl").unlink()
    mgtp(tmp_path, *again)
    by_id = {r["id"]: r for r in results(tmp_path)}
    assert [by_id[12 - r["id"]]["token_ids"] for r in found[1:11]] == [r["token_ids"] for r in found[1:11]]
    assert [len(r["logprobs"]) for r in found[1:11]] == [5 + n % 3 for n in range(10)]


def test_nothing_is_started_for_what_is_wrong(tmp_path, batch, capsys):
    lines = [{"prompt": "fine"}, {"prompt": "x", "max_tokenz": 3}]
    assert "in.jsonl line 2: unknown field 'max_tokenz'" in fail(batch(*lines), 2, capsys)
    good = batch(lines[0])
    assert "--prompts" in fail([a for a in good if "out" not in a and a != "--output"], 2, capsys)
    assert "--prompt does not go" in fail([*good, "--prompt", "x"], 2, capsys)
    assert "--chat does not go" in fail([*good, "--chat"], 2, capsys)
    assert "temperature" in fail([*good, "--temperature", "-1"], 2, capsys)
    (tmp_path / "out.jsonl").write_text("mine\n")
    assert "line 1 is no result of this batch" in fail(good, 2, capsys)
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"
    same = [*good[:4], "--output", good[3]]
    assert "is the file with the prompts" in fail(same, 2, capsys)
    assert "--unordered is for --prompts" in fail([*good[:2], "--prompt", "x", "--unordered"], 2, capsys)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--max-model-len", "257"), 2, "--max-model-len 257 is longer than the model's own 256 tokens"),
        (("--block-size", "12"), 2, "--block-size 12 must be a power of two"),
        (("--kv-cache-memory", "lots"), 2, "'lots' is not a size"),
        (("--kv-cache-memory", "1GiB,2GiB"), 2, "must be one size"),
        (("--kv-cache-memory", "1MiB", "--block-size", "256", "--max-num-seqs", "0"), 2, "--max-num-seqs 0"),
        (("--kv-cache-memory", "999TiB"), 4, "are free"),
    ],
)
def test_engine_options_that_cannot_be(options, code, words, batch, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    from mgtp.cli.app import main

    assert main(batch({"prompt": "x", "max_tokens": 3}, name="base", options=options)) == code
    error = capsys.readouterr().err.splitlines()[-2]
    assert error.startswith("error: ") and words in error, error
    assert_nothing_left(tmp_path)


def test_a_cache_that_is_too_small_says_what_would_fit(tiny_checkpoint, sharded, capsys):
    shard_set = sharded(tiny_checkpoint("long32k"), 2)
    arguments = ["generate", shard_set, "--prompt", "x", "--device", "cpu", "--max-model-len", "32768"]
    from mgtp.cli.app import main

    capsys.readouterr()  # bars of a library that has made the checkpoint
    assert main([*arguments, "--kv-cache-memory", "1MiB"]) == 4
    error, hint = capsys.readouterr().err.splitlines()
    # 2 kv heads of 8 numbers, keys and values, 2 layers, float32: 256 bytes a token and rank, one block is scratch.
    assert f"one sequence of 32768 tokens needs {(32768 + 16) * 256} bytes of KV cache, there are 1048576" in error
    assert "lower --max-model-len to 4080" in hint
    assert main([*arguments[:-2], "--max-tokens", "2", "--max-model-len", "4080", "--kv-cache-memory", "1MiB"]) == 0
