"""Mixtures of experts: choosing, running and weighing, against loops that can be read."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.layers.activation import ClampedSwiGLU, GatedActivation
from mgtp.runtime.layers.moe import Experts, MixtureOfExperts, Router, softmax_then_top_k, top_k_then_softmax
from tests.reference import max_difference

TOKENS, HIDDEN, EXPERTS, WIDTH, CHOSEN = 9, 6, 5, 4, 2


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_probabilities_over_all_experts_or_over_the_chosen():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    over_all, chosen = softmax_then_top_k(logits, 2, renormalize=False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(over_all, torch.softmax(logits, -1)[:, [1, 2]])
    among_chosen, _ = softmax_then_top_k(logits, 2, renormalize=True)
    torch.testing.assert_close(among_chosen.sum(), torch.tensor(1.0))
    # Softmax first or last is the same once the weights are made to sum to 1.
    torch.testing.assert_close(among_chosen, top_k_then_softmax(logits, 2)[0])


def test_clamped_swiglu_pairs_neighbours():
    gate_up = torch.tensor([[9.0, -9.0, 0.5, 0.25]])
    got = ClampedSwiGLU(alpha=1.702, limit=7.0)(gate_up)
    gate, up = torch.tensor([7.0, 0.5]), torch.tensor([-7.0, 0.25])
    torch.testing.assert_close(got[0], (up + 1) * gate * torch.sigmoid(1.702 * gate))


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_the_weighted_sum_of_the_chosen_experts(tokens, generator):
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    gate_up_bias, bias = torch.randn(EXPERTS, 2 * WIDTH, generator=generator), torch.randn(EXPERTS, HIDDEN)
    down, router = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator), torch.randn(EXPERTS, HIDDEN)
    x, act = torch.randn(tokens, HIDDEN, generator=generator), GatedActivation("silu")
    pick = partial(top_k_then_softmax, k=CHOSEN)
    mixture = MixtureOfExperts(
        Router(router, None, pick), Experts(gate_up, down, act, gate_up_bias), SingleRank(), down_bias=bias
    )
    weights, indices = pick(x @ router.T)
    expected = torch.zeros_like(x)
    for t in range(tokens):
        for weight, e in zip(weights[t], indices[t].tolist(), strict=True):
            expected[t] += weight * (down[e] @ act(gate_up[e] @ x[t] + gate_up_bias[e]) + bias[e])
    torch.testing.assert_close(mixture(x), expected)
    assert max_difference(mixture.experts.run_all(x, weights, indices), mixture.experts(x, weights, indices)) < 1e-5


def test_an_expert_that_nobody_chose_is_not_run(generator):
    """Even with weights that are not numbers it leaves no trace."""
    gate_up, down = torch.ones(3, 2, HIDDEN), torch.ones(3, HIDDEN, 1)
    gate_up[1] = float("nan")
    experts = Experts(gate_up, down, GatedActivation("silu"))
    out = experts(torch.ones(2, HIDDEN), torch.ones(2, 1), torch.tensor([[0], [2]]))
    assert out.isfinite().all()
    torch.testing.assert_close(experts.run_all(torch.ones(2, HIDDEN), torch.ones(2, 1), torch.tensor([[0], [2]])), out)
