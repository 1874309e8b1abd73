"""`mgtp generate` and `probe-memory` as a shell sees them: output, exit codes, one-line errors, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, assert_nothing_left, mgtp, rank_pids, start


@pytest.fixture
def tmp_path():
    """Shorter than pytest's own: the paths of Unix sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        yield Path(folder)


@pytest.fixture
def base(tiny_checkpoint):
    """(folder, prompt ids as an option's value, greedy ids) of the plain tiny checkpoint."""
    folder = tiny_checkpoint("base")
    reference = json.loads((folder / "ref.json").read_text())
    return folder, ",".join(map(str, reference["prompt_ids"])), reference["greedy_ids"]


@pytest.fixture
def base_tp2(base, sharded):
    return sharded(base[0], 2)


def test_json_document(tmp_path, base, base_tp2):
    _, prompt, greedy = base
    options = ("--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--device", "cpu")
    run = mgtp(tmp_path, "generate", base_tp2, "--prompt-ids", prompt, *options, "--logprobs", "2", "--json")
    document = json.loads(run.out)
    assert document["token_ids"] == greedy
    assert document["finish_reason"] == "length"
    assert document["usage"] == {"prompt_tokens": 40, "completion_tokens": 24, "total_tokens": 64}
    assert [r["file"] for r in document["ranks"]] == ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]
    assert len({r["pid"] for r in document["ranks"]}) == 2
    assert set(document["timing"]) == {"ready_s", "ttft_s", "decode_tokens_per_s"}
    for token_id, entry in zip(greedy, document["logprobs"], strict=True):
        assert entry["token_id"] == token_id == entry["top"][0]["token_id"]
        assert entry["logprob"] == entry["top"][0]["logprob"] <= 0
    assert "detected" in run.err and " ready in " in run.err


def test_same_seed_same_text_for_every_tp_size(tmp_path, base, sharded):
    texts = set()
    for tp_size in (1, 3):
        options = ("--prompt", "abc", "--seed", "7", "--temperature", "0.8", "--top-p", "0.9", "--max-tokens", "20")
        texts.add(mgtp(tmp_path, "generate", sharded(base[0], tp_size), *options, "--device", "cpu").out)
    assert len(texts) == 1


def test_side_by_side_runs_do_not_meet(tmp_path, base, base_tp2):
    _, prompt, greedy = base
    options = ("--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--device", "cpu", "--json")
    runs = [start(tmp_path, "generate", base_tp2, "--prompt-ids", prompt, *options) for _ in range(2)]
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        assert json.loads(out)["token_ids"] == greedy
    assert_nothing_left(tmp_path)


def test_ranks_map_their_own_file_alone_and_one_that_is_killed_is_named(tmp_path, sharded, tiny_checkpoint):
    shard_set = sharded(tiny_checkpoint("long32k"), 2)
    options = ("--prompt", "x", "--max-tokens", "30000", "--ignore-eos", "--device", "cpu", "--temperature", "0")
    run = start(tmp_path, "generate", shard_set, *options)
    assert run.stderr is not None
    while "ready" not in run.stderr.readline():
        assert run.poll() is None
    for pid in rank_pids(tmp_path):
        with open(f"/proc/{pid}/maps") as maps:
            mapped = {line.split()[-1].rsplit("/", 1)[1] for line in maps if ".safetensors" in line}
        assert mapped == {f"rank-{_rank_of(pid)}-of-2.safetensors"}
    os.kill(next(p for p in rank_pids(tmp_path) if _rank_of(p) == "1"), signal.SIGKILL)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 5
    assert err.startswith("error: rank 1 was killed by SIGKILL")
    assert "hint: " in err
    assert_nothing_left(tmp_path)


def _rank_of(pid: int) -> str:
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = dict(v.split(b"=", 1) for v in file.read().split(b"\0") if b"=" in v)
    return variables[b"RANK"].decode()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--prompt", "x", "--tp-size", "4"), 2, "tp"),
        (("--prompt", "x", "--dtype", "bfloat16"), 2, "float32 weights"),
        (("--prompt", "x", "--dtype", "foo"), 2, "dtype 'foo' is not supported"),
        (("--prompt", "x", "--device", "tpu"), 2, "--device"),
        (("--prompt", "x", "--devices", "a"), 2, "not a device index"),
        (("--prompt", "x", "--device", "cpu", "--devices", "0"), 2, "--devices"),
        (("--prompt", "x", "--temperature", "-1"), 2, "--temperature"),
        (("--prompt", "x", "--top-p", "nan"), 2, "--top-p"),
        (("--prompt", "x", "--max-tokens", "0"), 2, "--max-tokens"),
        (("--prompt", "x", "--max-tokens", "256"), 2, "256 tokens"),
        (("--prompt", "x" * 300,), 2, "of 300 tokens leaves no room in the context of 256 tokens"),
        (("--prompt-ids", "1,999"), 2, "999"),
        (("--prompt-ids", "1,b"), 2, "'b'"),
        (("--prompt", ""), 2, "no tokens"),
        ((), 2, "no prompt"),
        (("--prompt", "x", "--prompt-ids", "1"), 2, "both give a prompt"),
        (("--prompt", "x", "--system", "s"), 2, "--chat"),
        (("--prompt", "x", "--logprobs", "3"), 2, "nowhere to go"),
        (("--prompt", "x", "--nonsense"), 2, "--nonsense"),
        (("--prompt", "x", "--stop", ""), 2, "--stop"),
        (("--prompt", "x", "--stop", "\udcff"), 2, "not UTF-8"),
        (("--prompt", "x", "--max-tokens", "9" * 12), 2, "2147483647"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_a_hint(arguments, code, words, tmp_path, base_tp2, capsys):
    """In this process, since nothing may be started."""
    error = fail(["generate", base_tp2, *arguments], code, capsys)
    assert words in error


def fail(arguments: list[str], code: int, capsys) -> str:
    """Run a command that must fail with `code`; the one line it says."""
    from mgtp.cli.app import main

    assert main(arguments) == code
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert out == ""
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ") and lines[1].startswith("hint: "), err
    return lines[0]


def test_probe_memory_reports_about_one_nth(tmp_path, smollm2, sharded):
    run = mgtp(tmp_path, "probe-memory", sharded(smollm2, 2), "--device", "cpu", "--json")
    report = json.loads(run.out)
    assert report["within_plan"] is True
    for rank in report["ranks"]:
        assert abs(rank["weight_bytes"] / rank["planned_weight_bytes"] - 1) < 0.05
        assert 0.3 < rank["share"] < 0.7
    assert report["total_weight_bytes"] == sum(r["weight_bytes"] for r in report["ranks"])


def test_context_ranks_share_out_sequences_and_cache(tmp_path, base, base_tp2, sharded):
    """Two ranks of each file: the same ids. Each keeps its part of the cache."""
    _, prompt, greedy = base
    cp = ("--cp-size", "2", "--device", "cpu", "--json")
    options = ("--prompt-ids", prompt, "--temperature", "0", "--max-tokens", "24", "--ignore-eos")
    document = json.loads(mgtp(tmp_path, "generate", base_tp2, *options, *cp).out)
    assert document["token_ids"] == greedy
    assert [r["file"] for r in document["ranks"]] == [f"rank-{i}-of-2.safetensors" for i in (0, 1, 0, 1)]
    report = json.loads(mgtp(tmp_path, "probe-memory", sharded(base[0], 1), *cp).out)
    assert (report["tp_size"], report["cp_size"], report["within_plan"]) == (1, 2, True)
    # 256 positions in blocks of 2 x 16, and a scratch block; 2 layers, 4 kv heads of 8 numbers, keys and values.
    for rank in report["ranks"]:
        assert rank["kv_cache_tokens"] == 256
        assert rank["kv_cache_bytes"] == (256 // 32 + 1) * 16 * 2 * 4 * 8 * 2 * 4


def test_bench_times_prompts_at_several_cp_sizes(tmp_path, base, sharded):
    """All of them shorter than a block, so that one rank keeps nothing."""
    few = ("--batches", "1", "--prefills", "1x12", "--requests", "0", "--prompt-tokens", "4", "--output-tokens", "9")
    arguments = ("bench", sharded(base[0], 1), *few, "--cp-sizes", "2", "--device", "cpu", "--json")
    report = json.loads(mgtp(tmp_path, *arguments).out)
    assert (report["cp_size"], [p["tokens"] for p in report["prefill"]]) == (1, [12])
    (figure,) = report["first_token"]
    assert (figure["cp_size"], figure["requests"], figure["tokens"]) == (2, 1, 12) and figure["seconds"] > 0
    assert figure.keys() - {"cp_size"} == report["prefill"][0].keys()
    for f in (*report["decode"], *report["prefill"], figure):
        assert 0 < f["share_of_ceiling"] < 1
    assert report["load_bytes_per_s"] is None, "the file is mapped"


def test_a_rank_that_loads_too_much_fails_the_probe(tmp_path, smollm2, sharded, monkeypatch, capsys):
    """The ranks run a module that copies its weights besides mapping them. They import nothing of the current folder."""
    from mgtp.cli.app import main
    from mgtp.runtime.launch import group

    (tmp_path / "torch.py").write_text("raise SystemExit('not torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep if os.environ.get("PYTHONPATH") else None)
    monkeypatch.setattr(group, "RANK_MODULE", "tests.greedy_rank")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(["probe-memory", sharded(smollm2, 2), "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["within_plan"] is False
    assert "rank 0 holds" in err
    assert_nothing_left(tmp_path)
