"""benchmarks/peers.py with stand-ins for what is seldom installed: how it is called, read, and said to be missing."""

from __future__ import annotations

import json
import math
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers  # type: ignore[import-not-found]

    return peers


@pytest.fixture
def job(peers, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "config.json").write_text('{"vocab_size": 50}')
    return peers.Job(tmp_path / "model.gguf", tmp_path, "float32", "cpu", 4, 6, 2)


def test_batched_bench_is_called_and_read(peers, job, tmp_path, monkeypatch):
    """What it says comes through a logger, to either stream, among other lines."""
    program = tmp_path / "llama-batched-bench"
    line = '{"n_kv_max": 20, "pp": 4, "tg": 6, "pl": 2, "t_pp": 0.5, "t_tg": 1.25, "speed_tg": 9.6, "t": 1.75}'
    program.write_text(
        f"#!/bin/sh\necho \"$@\" > {tmp_path}/words\necho main: n_kv_max = 20\necho '{line}' >&2\necho\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert peers.llama_cpp(job)(2) == 1.75
    words = (tmp_path / "words").read_text()
    assert "-npp 4 -ntg 6 -npl 2 -c 20 " in words and f"-m {job.model} " in words and "--output-format jsonl" in words


def test_llama_cpp_python_runs_one_sequence(peers, job, monkeypatch):
    taken = []

    def generate(tokens, **options):
        for number in count():
            taken.append(number)
            yield number

    module = SimpleNamespace(Llama=lambda **options: SimpleNamespace(generate=generate))
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    run = peers.llama_cpp(job)
    assert run(1) >= 0 and len(taken) == job.new_tokens
    assert math.isnan(run(2))


def test_vllm_is_given_a_plain_checkpoint_and_ids(peers, job, monkeypatch):
    import torch
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.ones(2), "_pad.0": torch.zeros(1)}, job.folder / "set" / "rank-0-of-1.safetensors")
    asked = []
    llm = SimpleNamespace(generate=lambda prompts, params, use_tqdm: asked.append((prompts, params)))
    module = SimpleNamespace(LLM=lambda **options: asked.append(options) or llm, SamplingParams=dict)
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert peers.vllm(job)(2) >= 0
    (options, (prompts, params)) = asked
    assert load_file(Path(options["model"]) / "model.safetensors").keys() == {"a"}
    assert (Path(options["model"]) / "config.json").exists() and options["max_model_len"] == 10
    assert [len(p["prompt_token_ids"]) for p in prompts] == [4, 4] and params["max_tokens"] == 6


def test_what_is_missing_and_what_cannot_run_a_batch_is_left_out(peers, job, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    for load, words in ((peers.transformers, "not installed"), (peers.vllm, "not"), (peers.llama_cpp, "neither")):
        with pytest.raises(peers.Missing, match=words):
            load(job)
    times = iter([9.0, 9.0, 2.0, 4.0])  # a warm-up round, then one that counts
    runs = {"mgtp": lambda batch: next(times), "a": lambda batch: next(times), "b": lambda batch: float("nan")}
    found = peers.compare(runs, 2, job, 1)
    assert found == {"batch": 2, "tokens_per_s": {"mgtp": 6.0, "a": 3.0}, "ratio": {"a": 2.0}}
    json.dumps(found, allow_nan=False)
