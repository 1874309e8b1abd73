"""Sums that are left to the norm after them: the same logits, and as many as the layers have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
    calls, sent, num_sent = [], {}, 0

    def sum_add_norm(communicator, x, residual, weight, eps, one_plus, cast_first):
        calls.append(communicator.rank)
        part = x if x.shape[-1] else sent.pop(communicator.rank)
        return RMSNorm(weight, eps, one_plus=one_plus, cast_first=cast_first).add(
            communicator.all_reduce(part.contiguous()), residual
        )

    def send_product(communicator, x, weight):
        nonlocal num_sent
        num_sent += 1
        assert sent.setdefault(communicator.rank, product := F.linear(x, weight)) is product, (
            "the last was not received"
        )
        return True

    monkeypatch.setattr(ThreadCommunicator, "all_reduce_add_rms_norm", sum_add_norm, raising=False)
    ranks = ThreadRanks(folder, 2)
    assert torch.equal(ranks.full(PROMPT), expected)
    # Not where a bias follows the sum (this qwen3's o_proj), in a mixture of experts, or where a norm comes first.
    layers = len(ranks.runners[0].config.layers)
    number = {"all": 2 * layers, "some": layers, "none": 0}[fused]
    assert len(calls) == 2 * number, "every rank, once a sum"

    monkeypatch.setattr(ThreadCommunicator, "send_product", send_product, raising=False)
    assert torch.equal(ThreadRanks(folder, 2).full(PROMPT), expected)
    assert len(calls) == 4 * number
    # The last attention's sum, of which not all tokens are wanted, is not sent ahead.
    attention_sums = {"llama": layers, "qwen2": layers, "mixtral": layers}.get(recipe, 0)
    assert num_sent == 2 * (number - (attention_sums > 0))
