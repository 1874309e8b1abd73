"""The gated delta rule: chunks of tokens in parallel must equal the recurrence, from any state and at any length."""

from __future__ import annotations

import pytest
import torch

from mgtp.runtime.layers.delta_rule import CHUNK, delta_chunks, delta_step


def inputs(tokens: int, *, heads: int = 3, dk: int = 12, dv: int = 20, dtype: torch.dtype = torch.float64, decay=1.0):
    """q, k [h, n, dk] of unit length, v [h, n, dv], g, beta [h, n], state [h, dk, dv]."""
    g = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(random(heads, tokens, dk), dim=-1) for _ in range(2))
    log_decay = -decay * random(heads, tokens).abs()
    values = q * dk**-0.5, k, random(heads, tokens, dv), log_decay, random(heads, tokens).sigmoid()
    return [x.to(dtype) for x in (*values, random(heads, dk, dv))]


def by_steps(q, k, v, g, beta, state):
    """The recurrence, token by token."""
    outputs = []
    state = state.unsqueeze(0)
    for i in range(q.shape[1]):
        out, state = delta_step(*[x[:, i].unsqueeze(0) for x in (q, k, v, g, beta)], state=state)
        outputs.append(out[0])
    return torch.stack(outputs, dim=1), state[0]


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_chunks_equal_steps(tokens):
    arguments = inputs(tokens)
    for ours, expected in zip(delta_chunks(*arguments), by_steps(*arguments), strict=True):
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_a_step_follows_the_formula():
    """S = exp(g) S; S = S + k (x) beta (v - k^T S); output q^T S, written out for one head."""
    q, k, v, g, beta, state = inputs(1, heads=1, dk=2, dv=2)
    (out,), (new,) = delta_step(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), g.T, beta.T, state.unsqueeze(0)
    )
    decayed = g[0, 0].exp() * state[0]
    expected = decayed + torch.outer(k[0, 0], beta[0, 0] * (v[0, 0] - k[0, 0] @ decayed))
    torch.testing.assert_close(new[0], expected)
    torch.testing.assert_close(out[0], q[0, 0] @ expected)


def test_strong_decays_lose_no_digits():
    """Decays between tokens as differences of running sums would be off by the running sum's rounding, here 1e-4."""
    arguments = inputs(CHUNK, decay=50.0)
    exact, _ = by_steps(*arguments)
    out, _ = delta_chunks(*(x.float() for x in arguments))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6)


def test_pieces_equal_the_whole():
    """A prompt in pieces of any sizes: the state carries everything over."""
    q, k, v, g, beta, state = inputs(150)
    whole, last = delta_chunks(q, k, v, g, beta, state)
    outputs = []
    for a, b in ((0, 1), (1, 70), (70, 71), (71, 150)):
        out, state = delta_chunks(*[x[:, a:b] for x in (q, k, v, g, beta)], state=state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)
