"""The oneshot backend on GPUs: ranks that share one, and ranks on two. Guards against sums that are only nearly right,
stale data in replayed graphs, and workspaces that ranks see differently.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from subprocess import Popen

import pytest
import torch

from tests.cuda import collective_jobs as jobs
from tests.processes import start

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")]

PLACES = [
    pytest.param([0, 0], id="2 ranks share a GPU"),
    pytest.param([0, 0, 0, 0], id="4 ranks share a GPU"),
    pytest.param([0, 1], id="2 GPUs"),
]
JOBS = (jobs.sums, jobs.fused, jobs.replays, jobs.hammer)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_oneshot(job, devices, worlds):
    if max(devices) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    worlds[len(devices)].run_group(len(devices), job, devices)


def test_sharing_a_device_must_be_allowed(worlds):
    for message in worlds[2].run_group(2, jobs.refused, [0, 0]):
        assert "ranks 0 and 1 share a device without --allow-shared-device" in message


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random Llama whose tied embedding makes the likeliest tokens stand out."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        made.model.embed_tokens.weight.normal_(0, 0.5)
    folder = tmp_path_factory.mktemp("model") / "model"
    made.save_pretrained(folder)
    return folder


def test_generate_gives_the_ids_of_one_rank(model, sharded):
    shared = ("--allow-shared-device", "--devices", "0")
    runs: dict[str, tuple[int, tuple[str, ...]]] = {"tp 1": (1, ("--devices", "0"))}
    for tp_size in (2, 4):
        runs[f"tp {tp_size} oneshot, one GPU"] = (tp_size, (*shared, "--collective", "oneshot"))
    if torch.cuda.device_count() > 1:
        for backend in ("nccl", "oneshot"):
            runs[f"tp 2 {backend}, two GPUs"] = (2, ("--devices", "0,1", "--collective", backend))
    prompt = ",".join(map(str, range(10, 40)))
    options = ("--prompt-ids", prompt, "--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json")
    options += ("--device", "cuda", "--max-model-len", "128", "--kv-cache-memory", "64MiB")
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        started: dict[str, Popen[str]] = {}
        for name, (tp_size, extra) in runs.items():
            (Path(folder) / str(len(started))).mkdir()
            arguments = ("generate", sharded(model, tp_size), *options, *extra)
            started[name] = start(Path(folder) / str(len(started)), *arguments)
        try:
            outputs = {name: process.communicate(timeout=100) for name, process in started.items()}
        finally:
            for process in started.values():
                process.kill()
    codes = {name: process.returncode for name, process in started.items()}
    assert set(codes.values()) == {0}, [(name, codes[name], outputs[name][1][-600:]) for name in codes]
    ids = {name: json.loads(out)["token_ids"] for name, (out, _) in outputs.items()}
    assert len({tuple(i) for i in ids.values()}) == 1, ids
    for name, (_, err) in outputs.items():
        backend = "oneshot" if "oneshot" in name else "nccl" if "nccl" in name else None
        assert backend is None or f"ranks: {backend} (asked for)" in err, err
        assert "does not end by itself" not in err, err
