"""Sharded equals unsharded: every tp size gives transformers' ids and logits on tiny checkpoints with everything random.

Guards against the faults that tensor parallelism brings: wrong kv head for a q head, biases added on every rank, norms
or ropes ignored, padded vocabulary that wins, windows off by one, caches that mix up tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rank_jobs import cached_logits, full_logits, greedy, run_requests
from tests.reference import (
    assert_close,
    load_reference,
    recipe_prompt,
    reference_cached_logits,
    reference_greedy,
    reference_logits,
)

CASES = {
    "base": (1, 2, 3, 4, 8),
    "heads28_kv4": (2, 3, 4, 5, 7, 8),
    "heads12_kv2": (1, 2, 4, 8),
    "mqa_kv1": (2, 4, 8),
    "vocab331": (2, 3, 4, 8),
    "tied": (1, 2, 4),
    "tied_vocab331": (2, 4),
    "headdim": (1, 2, 4),
    "allbias": (2, 4, 8),
    "qwen2_qkvbias": (1, 3, 8),
    "rope_llama3": (1, 2),
    "rope_llama3_oldkeys": (1, 2),
    "rope_dynamic_short": (1, 2),
    "sliding8": (1, 2, 3, 8),
    "multishard": (2,),
    "overlay_index": (2,),
}

RECIPES = ("llama", "llama3_scaled", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize(("name", "tp_size"), [(n, tp) for n, sizes in CASES.items() for tp in sizes])
def test_greedy_ids_of_reported_cases(name, tp_size, world, tiny_checkpoint, sharded):
    folder = tiny_checkpoint(name)
    reference = json.loads((folder / "ref.json").read_text())
    shard_set = sharded(folder, tp_size)
    ids = world.run(tp_size, greedy, shard_set, reference["prompt_ids"], 24)[0]
    assert ids == reference["greedy_ids"]


@pytest.mark.parametrize("tp_size", (1, 2, 3, 4, 6))
@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_ids_in_float32(name, tp_size, world, recipe_checkpoint, sharded):
    folder = recipe_checkpoint(name)
    model, prompt = load_reference(str(folder)), recipe_prompt(30)
    shard_set = sharded(folder, tp_size)
    for ours in world.run(tp_size, full_logits, shard_set, prompt):
        assert_close(ours, reference_logits(model, prompt), 1e-4, "full")
    for ours in world.run(tp_size, cached_logits, shard_set, prompt, 11):
        assert_close(ours, reference_cached_logits(model, prompt, 11), 1e-4, "cached")
    assert world.run(tp_size, greedy, shard_set, prompt, 24)[0] == reference_greedy(model, prompt, 24)


def test_logits_over_gloo(world, recipe_checkpoint, sharded):
    """The other tests here and in the families' files exchange over pipes, which takes a tenth of the time."""
    folder, prompt = recipe_checkpoint("qwen3"), recipe_prompt(30)
    want = reference_logits(load_reference(str(folder)), prompt)
    for ours in world.run_group(3, full_logits, sharded(folder, 3), prompt):
        assert_close(ours, want, 1e-4, "full")


@pytest.mark.parametrize("tp_size", (1, 3, 4))
@pytest.mark.parametrize("name", RECIPES)
def test_logits_in_float64(name, tp_size, world, recipe_checkpoint, sharded):
    """Nearly bit-exact: float64 sums leave no room for a small fault to hide in."""
    folder = recipe_checkpoint(name, "float64")
    model, prompt = load_reference(str(folder), "float64"), recipe_prompt(30)
    ours = world.run(tp_size, full_logits, sharded(folder, tp_size, "float64"), prompt)[0]
    assert_close(ours, reference_logits(model, prompt), 2e-6, name)


@pytest.mark.parametrize("tp_size", (1, 2, 3))
def test_mixed_requests_equal_single_ones(tp_size, world, recipe_checkpoint, sharded):
    """Requests of all lengths together, with chunked prefill and too few blocks for all: tokens stay the same."""
    from mgtp.runtime.sampling_params import SamplingParams

    folder = recipe_checkpoint("qwen3")
    shard_set = sharded(folder, tp_size)
    prompts = [recipe_prompt(n, seed=n) for n in (3, 40, 17, 90, 1, 33)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (20, 5, 31, 12, 25, 8)]
    model = load_reference(str(folder))
    want = [reference_greedy(model, p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    options = {"max_num_seqs": 4, "max_batch_tokens": 24, "block_size": 4, "max_model_len": 128}
    plenty = world.run(tp_size, run_requests, shard_set, prompts, params)[0]
    scarce = world.run(tp_size, _run_scarce, shard_set, prompts, params, options)[0]
    assert plenty == want
    assert scarce == want


def _run_scarce(communicator, shard_set, prompts, params, options):
    """With a cache for hardly more than one full sequence, so that sequences are preempted."""
    from mgtp.shardplan.shard_set import ShardSet

    start, stop = ShardSet.open(Path(shard_set)).plan.axes["kv_heads"].ranges[communicator.rank]
    return run_requests(communicator, shard_set, prompts, params, kv_cache_bytes=45_000 * (stop - start), **options)
