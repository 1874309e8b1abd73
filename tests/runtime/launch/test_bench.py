"""What `mgtp bench` may measure, refused before anything is started, and what it says a step must do at least."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgtp.runtime.dummy import dummy_shard_set
from mgtp.runtime.launch.bench import Bench, Ceiling
from mgtp.runtime.launch.bench_options import BenchOptions, check_at_once, fitting_options
from mgtp.runtime.launch.bench_work import metric, prefill_flops, step_bytes
from mgtp.runtime.launch.start import MAX_NUM_SEQS, LaunchOptions, check_sizes
from mgtp.shardplan.errors import DeviceError, UsageError

LLAMA_8B = Path(__file__).parents[3] / "benchmarks" / "llama_8b.json"


@pytest.fixture(scope="module")
def llama_8b():
    return dummy_shard_set(LLAMA_8B, 1)


def test_what_is_not_said_fits_the_context():
    """A model of 256 positions was sent prompts of 512 and 8000 tokens, and its rank died."""
    long = fitting_options(8192, [1], None, 512, None, None)
    assert (long.prompt_tokens, long.output_tokens) == (512, 128)
    assert long.prefills == [(1, 512), (32, 512), (1, 8000)] and long.longest == 8001 and long.most_at_once == 512
    short = fitting_options(256, [1, 8], None, 4, None, None)
    assert short.request_tokens == 256 == short.longest
    assert short.prefills == [(1, 255), (32, 255)]
    assert fitting_options(256, [1], [], 0, 250, None).output_tokens == 6
    assert fitting_options(256, [1], [], 0, None, 250).prompt_tokens == 6


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((256, [], [], 0, None, None), "nothing is left to measure"),
        ((256, [1], [(2, 256)], 0, None, None), "--prefills 2x256 and a first token need 257 tokens of context"),
        ((256, [1], [], 0, 200, 100), "--prompt-tokens 200 and --output-tokens 100 need 300 tokens"),
        ((256, [1], [], 0, 10, 1), "--output-tokens 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, words):
    with pytest.raises(UsageError) as refused:
        fitting_options(*given)
    assert words in refused.value.message


def test_a_batch_must_run_as_one(llama_8b):
    options = fitting_options(8192, [1, 8], [], 0, 512, 128)
    check_at_once(options, LaunchOptions(max_num_seqs=8))
    with pytest.raises(UsageError, match="--batches 8: with --max-num-seqs 7 fewer"):
        check_at_once(options, LaunchOptions(max_num_seqs=7))
    ready = [SimpleNamespace(device="cpu", kv_cache_tokens=7 * 640)]
    bench = Bench(SimpleNamespace(ready=ready), llama_8b, LaunchOptions(max_num_seqs=8))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="--batches 8: the KV cache holds 7 sequences of 640 tokens"):
        bench._check_room(options)


def test_too_many_sequences_are_refused_before_a_place_is_made_for_each(llama_8b):
    with pytest.raises(UsageError, match="--max-num-seqs 99999999 is more than 65536"):
        check_sizes(llama_8b, LaunchOptions(max_num_seqs=99999999))
    check_sizes(llama_8b, LaunchOptions(max_num_seqs=MAX_NUM_SEQS))


def test_the_floor_of_an_offline_run_is_its_prompts_and_its_steps(llama_8b):
    """Half of the requests run at once: twice as many steps, each of which reads all weights."""
    ceiling = Ceiling(copy_bytes_per_s=4e12, product_flops=7e14)
    model, plan = llama_8b.model, llama_8b.plan
    ready = [SimpleNamespace(device="cpu")]
    bench = Bench(SimpleNamespace(ready=ready), llama_8b, LaunchOptions(max_num_seqs=4))  # type: ignore[arg-type]
    found = bench._least_seconds(BenchOptions([], [], 8, 512, 128), ceiling)
    steps = 2 * 127 * step_bytes(model, plan, 4, 512 + 64) / 4e12
    assert found == pytest.approx(prefill_flops(model, plan, 8, 512) / 7e14 + steps)
    assert step_bytes(model, plan, 1, 576) == pytest.approx(15.09e9, rel=1e-3), "docs/performance.md"


def test_experts_that_nobody_chooses_are_no_work(tmp_path):
    """All 8 were counted: a step that reads 2 of them was at 150 % of the ceiling."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 1024,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 256, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shard_set = dummy_shard_set(tmp_path, 1)
    model, plan = shard_set.model, shard_set.plan
    expert, cached = 3 * 64 * 1024, 2 * 2 * 2 * 16 * 4
    few, many = step_bytes(model, plan, 1, 1) - cached, step_bytes(model, plan, 64, 1) - 64 * cached
    assert many - few == pytest.approx(2 * 6 * expert * 4, rel=1e-3), "all 8 of each layer, not 2"
    flops = [prefill_flops(model, plan, 1, tokens) for tokens in (8, 9)]
    assert 2 * 2 * 2 * expert < flops[1] - flops[0] < 2 * 2 * 3 * expert, "2 experts a layer and what is beside them"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5 B/s"), (999, "999 B/s"), (999.6, "1 kB/s"), (1.95e11, "195 GB/s"), (4.21e12, "4.21 TB/s")],
)
def test_metric(value, text):
    assert metric(value, "B/s") == text
