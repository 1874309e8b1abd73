"""Whole models by kernels: mixed requests, chunked prefill and decode in one step, equal the reference's tokens."""

from __future__ import annotations

import pytest

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.sampling_params import SamplingParams
from tests.rank_jobs import run_requests
from tests.reference import load_reference, reference_greedy


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_mixed_requests(name, recipe_checkpoint, sharded):
    """Guards against rows of one sequence that are computed as another's: sequences are reordered within a step."""
    folder = recipe_checkpoint(name)
    prompts = [[20 + i for i in range(n)] for n in (3, 30, 1)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (4, 2, 3)]
    options = {"max_num_seqs": 4, "max_batch_tokens": 24, "block_size": 4, "max_model_len": 64}
    found = run_requests(SingleRank(), sharded(folder, 1), prompts, params, **options)
    model = load_reference(str(folder))
    assert found == [reference_greedy(model, p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
