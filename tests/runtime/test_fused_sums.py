"""Sums that are left to the norm after them: the same logits, and as many as the layers have."""

from __future__ import annotations

import pytest
import torch

from mgtp.runtime.layers.norm import RMSNorm
from tests.thread_ranks import ThreadCommunicator, ThreadRanks

PROMPT = [5, 17, 3, 40, 8, 21, 9]


@pytest.mark.parametrize(
    ("recipe", "fused"),
    [("llama", "all"), ("qwen3", "some"), ("mixtral", "some"), ("gemma3", "none"), ("qwen2", "all")],
)
def test_logits_are_those_of_separate_sums(recipe, fused, recipe_checkpoint, monkeypatch):
    folder = recipe_checkpoint(recipe)
    expected = ThreadRanks(folder, 2).full(PROMPT)
    calls = []

    def sum_add_norm(communicator, x, residual, weight, eps, one_plus, cast_first):
        calls.append(communicator.rank)
        return RMSNorm(weight, eps, one_plus=one_plus, cast_first=cast_first).add(
            communicator.all_reduce(x.contiguous()), residual
        )

    monkeypatch.setattr(ThreadCommunicator, "all_reduce_add_rms_norm", sum_add_norm, raising=False)
    monkeypatch.setattr(ThreadCommunicator, "fuses", False, raising=False)
    assert torch.equal(ThreadRanks(folder, 2).full(PROMPT), expected)
    assert not calls, "start-up measured that it does not pay"
    monkeypatch.setattr(ThreadCommunicator, "fuses", True)
    ranks = ThreadRanks(folder, 2)
    assert torch.equal(ranks.full(PROMPT), expected)
    # Not where a bias follows the sum (this qwen3's o_proj), in a mixture of experts, or where a norm comes first.
    layers = len(ranks.runners[0].config.layers)
    number = {"all": 2 * layers, "some": layers, "none": 0}[fused]
    assert len(calls) == 2 * number, "every rank, once a sum"
