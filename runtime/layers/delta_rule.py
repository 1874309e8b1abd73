"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024): a linear attention whose state forgets and corrects itself.

A head's state S [dk, dv] maps keys to values. A token with key k, value v, decay exp(g) and strength beta does
    S = exp(g) S;  S = S + k (x) beta (v - k^T S);  output q^T S.

Shapes: S sequences, h heads, n tokens, C tokens a chunk, N chunks, dk and dv the dimensions of keys and values.
Everything is float32; queries and keys are of unit length, queries scaled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens that are worked on at once; more means larger triangular systems, fewer means more steps."""


def delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: q, k [S, h, dk], v [S, h, dv], g, beta [S, h], state [S, h, dk, dv].

    Returns the outputs [S, h, dv] and the new states.
    """
    state = state * g.exp()[..., None, None]
    correction = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


class PreparedChunks(NamedTuple):
    """What N chunks of tokens do, as far as it does not depend on the state before them; all [h, N, ..].

    q and k carry the decay from a chunk's start and to its end; `attention` [C, C] is among a chunk's own tokens; of
    what a token writes, `fresh` [C, dv] is new, and `known` [C, dk] asks the state what it says already.
    """

    q: torch.Tensor
    k: torch.Tensor
    attention: torch.Tensor
    fresh: torch.Tensor
    known: torch.Tensor
    over_chunk: torch.Tensor
    num_tokens: int


def delta_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """n tokens of one sequence: q, k [h, n, dk], v [h, n, dv], g, beta [h, n], state [h, dk, dv].

    Returns the outputs [h, n, dv] and the new state.
    """
    return run_chunks(prepare_chunks(q, k, v, g, beta), state)


def prepare_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> PreparedChunks:
    """The larger part of the work, which needs no state: all chunks in parallel.

    Section 3 of the paper; the triangular systems come from the WY form of the product of the corrections.
    """
    tokens = q.shape[1]
    # Padding has beta 0 and g 0: it changes nothing.
    size, pad = min(tokens, CHUNK), -tokens % min(tokens, CHUNK)
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, size)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(1, (-1, size)) for x in (g, beta))

    decay = _decays(g)
    from_start = g.cumsum(-1).exp().unsqueeze(-1)
    weighted_k = k * beta.unsqueeze(-1)

    # What each token writes: its value less what the chunk's earlier tokens, and the state before it, already say.
    system = (weighted_k @ k.transpose(-1, -2)) * decay
    right = torch.cat([v * beta.unsqueeze(-1), weighted_k * from_start], dim=-1)
    writes = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, known = writes.split([v.shape[-1], k.shape[-1]], dim=-1)

    attention = (q @ k.transpose(-1, -2)) * decay
    q, k = q * from_start, k * decay[..., -1, :].unsqueeze(-1)
    return PreparedChunks(q, k, attention, fresh, known, from_start[..., -1:, :], tokens)


def run_chunks(chunks: PreparedChunks, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the state [h, dk, dv] through all chunks: the outputs [h, n, dv], and the state after them."""
    q, k, attention, fresh, known, over_chunk, num_tokens = chunks
    outputs = []
    for i in range(q.shape[1]):
        written = fresh[:, i] - known[:, i] @ state
        outputs.append(q[:, i] @ state + attention[:, i] @ written)
        state = state * over_chunk[:, i] + k[:, i].transpose(-1, -2) @ written
    return torch.cat(outputs, dim=1)[:, :num_tokens], state


def _decays(g: torch.Tensor) -> torch.Tensor:
    """[.., C] -> [.., C, C]: the decay from token j to token i, exp(g[j+1] + .. + g[i]), and 0 where j is later.

    Each sum is taken for itself: as a difference of running sums it would lose the digits that exp then magnifies
    (Dao and Gu 2024, "segsum").
    """
    size = g.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=g.device)
    sums = g.unsqueeze(-1).where(ones.tril(-1), 0.0).cumsum(-2)
    return sums.where(ones.tril(), float("-inf")).exp()
