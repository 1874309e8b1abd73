"""Qwen3.5, OLMo 2 and 3, and the mixtures of experts against transformers, at tp sizes that divide nothing.

Guards against what these families add: recurrent states that leak between sequences or get lost between steps, packed
projections cut across their segments, norms over heads that no rank holds all of, experts' columns paired wrongly,
routing that differs between ranks, biases counted once a rank, sinks and windows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mgtp.runtime.messages import Request, Stop
from mgtp.runtime.sampling_params import SamplingParams
from tests.random_shapes import CONFIGS, build_random, largest_tp_size
from tests.rank_jobs import cached_logits, chunked_logits, full_logits, greedy, load_worker
from tests.recipes import RECIPES as RECIPES_BY_NAME
from tests.recipes import randomize_
from tests.reference import (
    assert_close,
    load_reference,
    max_difference,
    recipe_prompt,
    reference_cached_logits,
    reference_greedy,
    reference_logits,
)
from tests.thread_ranks import ThreadRanks

RECIPES = ("qwen3_5", "qwen3_5_vl", "olmo2", "olmo3", "qwen3_moe", "mixtral", "gpt_oss")
PROMPT = recipe_prompt(30)
FIRST = 11  # tokens that go into the cache at once


@cache
def expected(folder: str, dtype: str = "float32") -> tuple[torch.Tensor, torch.Tensor, float]:
    """The reference's logits of PROMPT, in one pass and with its cache, and how far these two are apart."""
    model = load_reference(folder, dtype)
    full, cached = reference_logits(model, PROMPT), reference_cached_logits(model, PROMPT, FIRST)
    return full, cached, max_difference(full[FIRST - 1 :], cached)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_ids_in_float32(name, tp_size, world, recipe_checkpoint, sharded):
    folder = recipe_checkpoint(name)
    full, cached, _ = expected(str(folder))
    shard_set = sharded(folder, tp_size)
    for ours in world.run(tp_size, full_logits, shard_set, PROMPT):
        assert_close(ours, full, 1e-4, "full")
    for ours in world.run(tp_size, cached_logits, shard_set, PROMPT, FIRST):
        assert_close(ours, cached, 1e-4, "cached")
    for ours in world.run(tp_size, chunked_logits, shard_set, PROMPT, 7):
        assert_close(ours, full, 1e-4, "in chunks")
    ids = world.run(tp_size, greedy, shard_set, PROMPT, 24)[0]
    assert ids == reference_greedy(load_reference(str(folder)), PROMPT, 24)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_logits_in_float64(name, tp_size, world, recipe_checkpoint, sharded):
    """Nearly bit-exact: float64 sums leave no room for a small fault to hide in."""
    folder = recipe_checkpoint(name, "float64")
    full, cached, gap = expected(str(folder), "float64")
    limit = max(2e-6, 2 * gap)
    shard_set = sharded(folder, tp_size, "float64")
    assert_close(world.run(tp_size, full_logits, shard_set, PROMPT)[0], full, limit, "full")
    assert_close(world.run(tp_size, cached_logits, shard_set, PROMPT, FIRST)[0], cached, limit, "cached")


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3_5", "olmo2", "olmo3"])
def test_bfloat16_is_as_exact_as_the_reference(name, tp_size, world, recipe_checkpoint, sharded):
    """Mixtures of experts are left out: a rounded score may choose another expert, in the reference as here."""
    exact = expected(str(recipe_checkpoint(name)))[0]
    folder = recipe_checkpoint(name, "bfloat16")
    allowed = (expected(str(folder), "bfloat16")[0].float() - exact).abs()
    ours = world.run(tp_size, full_logits, sharded(folder, tp_size, "bfloat16"), PROMPT)[0]
    error = (ours.float() - exact).abs()
    assert error.mean() <= 2 * allowed.mean()
    assert error.max() <= 2 * allowed.max()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_mixed_requests_equal_single_ones(name, tp_size, world, recipe_checkpoint, sharded):
    """Requests of all lengths together, prefilled in chunks, more than there are slots, with and without preemption."""
    folder = recipe_checkpoint(name)
    prompts = [recipe_prompt(n, seed=n) for n in (3, 40, 17, 90, 1, 33)]
    counts = [20, 5, 31, 12, 25, 8]
    model = load_reference(str(folder))
    want = [reference_greedy(model, p, n) for p, n in zip(prompts, counts, strict=True)]
    shard_set = sharded(folder, tp_size)
    plenty, preempted = world.run(tp_size, _run_mixed, shard_set, prompts, counts, None)[0]
    assert plenty == want
    assert preempted == 0
    scarce, preempted = world.run(tp_size, _run_mixed, shard_set, prompts, counts, 1.3)[0]
    assert scarce == want
    assert preempted > 0


def _run_mixed(
    communicator: Any, shard_set: str, prompts: list[list[int]], counts: list[int], sequences: float | None
) -> tuple[list[list[int]], int]:
    """(greedy ids of every prompt, how often one was preempted), with a KV cache for so many full sequences."""
    options: dict[str, Any] = {"max_num_seqs": 4, "max_batch_tokens": 24, "block_size": 4, "max_model_len": 128}
    if sequences is not None:
        options["kv_cache_bytes"] = _cache_bytes(communicator, shard_set, options, sequences)
    worker = load_worker(communicator, shard_set, **options)
    if communicator.rank > 0:
        worker.follow()
        return [], 0
    engine = worker.make_engine()
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        engine.add(Request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True), []))
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.scheduler.has_work:
        tokens, failures = engine.step()
        assert not failures, failures
        # What the front may ask for at any time: it must not disturb the sequences that are running.
        if len(outputs["0"]) == 3 and communicator.size == 1:
            worker.warm_up()
        for token in tokens:
            outputs[token.id].append(token.token_id)
    worker.link.send_step(Stop())
    return list(outputs.values()), engine.scheduler.num_preemptions


def _cache_bytes(communicator: Any, shard_set: str, options: dict[str, Any], sequences: float) -> int:
    """Bytes of cache in which the recurrent states and so many sequences of full length fit on this rank."""
    from mgtp.runtime.capacity import CacheDemand
    from mgtp.shardplan.shard_set import ShardSet

    opened = ShardSet.open(Path(shard_set), ranks=[communicator.rank])
    model, axes, rank = opened.model, opened.plan.shared_axes(), communicator.rank
    demand = CacheDemand(**{k: options[k] for k in ("max_num_seqs", "max_model_len", "max_batch_tokens", "block_size")})
    needs = demand.needs(model, axes, rank, 4)
    blocks = [int((count - 1) * sequences) + 1 for count in needs.blocks(1, demand.max_model_len)]
    return needs.block_bytes(blocks) + needs.state_bytes(demand.max_num_seqs)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 4))])
@pytest.mark.parametrize("family", CONFIGS)
def test_other_shapes(family, seed, tmp_path):
    """Random head groups, dimensions, patterns, windows, numbers of experts and options, at tp sizes up to the most."""
    for dtype, limit in (("float32", 1e-4), ("float64", 2e-6)):
        model, folder = build_random(family, seed, getattr(torch, dtype)), tmp_path / dtype
        model.save_pretrained(folder)
        prompt = recipe_prompt(40, vocab=model.config.vocab_size, seed=seed)
        full, cached = reference_logits(model, prompt), reference_cached_logits(model, prompt, FIRST)
        if dtype == "float64" and family.startswith("olmo"):
            limit = 4e-6  # its norms over all heads are float32 sums, whose last bit depends on the order
        limit, most = max(limit, 2 * max_difference(full[FIRST - 1 :], cached)), largest_tp_size(model.config)
        for tp_size in {min(2 + seed % 2, most), min(8, most)}:
            ranks = ThreadRanks(folder, tp_size, dtype)
            assert_close(ranks.full(prompt), full, limit, f"{dtype}, tp {tp_size}, full")
            assert_close(ranks.cached(prompt, FIRST, slot=1), cached, limit, f"{dtype}, tp {tp_size}, cached")
            assert_close(ranks.chunked(prompt, 9, slot=2), full, limit, f"{dtype}, tp {tp_size}, in chunks")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_may_be_stacked_on_disk(name, world, recipe_checkpoint, sharded, tmp_path):
    """The spelling that transformers 5 uses in memory, and writes when asked to keep it."""
    model = load_reference(str(recipe_checkpoint(name)))
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    ours = world.run(3, full_logits, sharded(tmp_path / "stacked", 3), PROMPT)[0]
    assert_close(ours, reference_logits(model, PROMPT), 1e-4, name)


def test_a_model_of_delta_nets_alone(world, tmp_path, sharded):
    """There is no KV cache at all; transformers has no cached form of it."""
    cls, config = RECIPES_BY_NAME["qwen3_5"]()
    config.layer_types = ["linear_attention"] * 4
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize_(model)
    model.save_pretrained(tmp_path)
    prompt = PROMPT[:12]
    want = list(prompt)
    for _ in range(8):
        want.append(int(reference_logits(model, want)[-1].argmax()))
    assert world.run(2, greedy, sharded(tmp_path, 2), prompt, 8)[0] == want[12:]
