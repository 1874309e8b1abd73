"""Whole models by kernels: mixed requests, chunked prefill and decode in one step, equal the reference's tokens."""

from __future__ import annotations

from typing import Any

import pytest

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.kernels.prompt_attention import PromptTiling
from mgtp.runtime.layers import paged_attention
from mgtp.runtime.sampling_params import SamplingParams
from tests.rank_jobs import greedy, run_requests
from tests.reference import load_reference, recipe_prompt, reference_greedy


@pytest.mark.parametrize(("name", "whole_prompts"), [("qwen3", False), ("gpt_oss", False), ("gpt_oss", True)])
def test_mixed_requests(name, whole_prompts, recipe_checkpoint, sharded, monkeypatch):
    """Guards against rows of one sequence that are computed as another's: sequences are reordered within a step.

    And against taking sequences that go on for whole ones, where those have a kernel of their own.
    """
    if whole_prompts:
        tiling = PromptTiling(16, 16, 4, 2)
        monkeypatch.setattr(paged_attention, "prompt_tiling", lambda *_: tiling)
    folder = recipe_checkpoint(name)
    prompts = [[20 + n + i for i in range(n)] for n in (3, 30, 1, 6)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (4, 2, 3, 2)]
    options = {"max_num_seqs": 4, "max_batch_tokens": 24, "block_size": 4, "max_model_len": 64}
    found = run_requests(SingleRank(), sharded(folder, 1), prompts, params, **options)
    model = load_reference(str(folder))
    assert found == [reference_greedy(model, p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma4_e"])
def test_context_ranks(name, world, recipe_checkpoint, sharded):
    """A prompt in one piece and in several: new keys as they are, and earlier ones gathered from all ranks' caches.

    What follows is decoded over what each rank keeps.
    """
    folder, prompt = recipe_checkpoint(name), recipe_prompt(37)
    want = reference_greedy(load_reference(str(folder)), prompt, 3)
    for most in (64, 10):
        assert world.run_mesh(1, 2, _greedy_in_pieces, sharded(folder, 1), prompt, most)[0] == want, most


def test_context_ranks_decode_beside_prompts(world, recipe_checkpoint, sharded):
    """Steps with both are done in two: logits must come back in the order of the step's sequences."""
    folder, prompts = recipe_checkpoint("llama"), [recipe_prompt(n, seed=n) for n in (3, 30, 1)]
    reference = load_reference(str(folder))
    want = [reference_greedy(reference, prompt, 4) for prompt in prompts]
    assert world.run_mesh(1, 2, _greedy_at_once, sharded(folder, 1), prompts)[0] == want


def _greedy_at_once(ranks: Any, shard_set: str, prompts: list[list[int]]) -> list[list[int]] | None:
    params = [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True) for _ in prompts]
    options = {"max_num_seqs": 4, "max_batch_tokens": 12, "block_size": 4, "max_model_len": 64}
    return run_requests(ranks, shard_set, prompts, params, **options)


def _greedy_in_pieces(ranks: Any, shard_set: str, prompt: list[int], most: int) -> list[int]:
    return greedy(ranks, shard_set, prompt, 3, max_batch_tokens=most, block_size=4, max_model_len=64)
