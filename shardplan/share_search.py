"""Which shares give devices of unequal size the longest context: proportional ones first, then better ones nearby."""

from __future__ import annotations

from collections.abc import Sequence

from .config import ModelConfig
from .fit import COLLECTIVE_BYTES, CONTEXT_BYTES, Fit, fit, rank_weights, weight_kinds, workspace_bytes
from .partition import model_axes
from .quantities import lowest_terms

_FINEST = 64
"""Shares are made finer up to so many parts a rank: heads and units are coarse, so more would change little."""


def best_shares(
    model: ModelConfig, itemsize: int, devices: Sequence[int], max_model_len: int | None = None, cp_size: int = 1
) -> tuple[list[int], Fit]:
    """Shares for `devices` and their fit: none that differ by one part are better. They depend on nothing else."""
    kinds, num_ranks = weight_kinds(model), len(devices)

    def fit_of(shares: list[int]) -> Fit:
        axes = model_axes(model, shares)
        weights = rank_weights(kinds, axes, num_ranks, itemsize)
        return fit(model, axes, weights, itemsize, devices, max_model_len, cp_size)

    equal = model_axes(model, [1] * num_ranks)
    workspace = max(workspace_bytes(model, equal, r, itemsize) for r in range(num_ranks))
    shares = proportional_shares(devices, CONTEXT_BYTES + COLLECTIVE_BYTES + workspace)
    best = fit_of(shares)
    while True:
        tried = [(near, fit_of(near)) for near in _nearby(shares, best)]
        nearest = max(tried, key=lambda pair: _score(pair[1]))
        if _score(nearest[1]) <= _score(best):
            return shares, best
        shares, best = nearest


def _score(found: Fit) -> tuple[int, int]:
    """The longer context is better; where there is none, more room on the tightest rank."""
    return found.longest_context, 0 if found.longest_context else found.tightest.cache_budget


def _nearby(shares: list[int], found: Fit) -> list[list[int]]:
    """Shares with one part less for the tightest rank, or one more for another; of as many parts and of twice as many."""
    tight = found.tightest.rank
    near = []
    for factor in (1, 2) if sum(shares) <= _FINEST * len(shares) // 2 else (1,):
        finer = [factor * share for share in shares]
        for rank in range(len(shares)):
            changed = [*finer]
            changed[rank] += -1 if rank == tight else 1
            if changed[rank] > 0:
                near.append(lowest_terms(changed))
    return near


def proportional_shares(device_bytes: Sequence[int], fixed_bytes: int) -> list[int]:
    """Shares in proportion to what devices have left after `fixed_bytes` each: the smallest numbers within 8 %.

    Heads and units are coarse, so finer shares would change little. Devices that are too small get one part.
    """
    left = [max(size - fixed_bytes, 1) for size in device_bytes]
    least = min(left)

    def shares_of(parts: int) -> list[int]:
        return [max(1, round(size * parts / least)) for size in left]

    def is_close(parts: int) -> bool:
        pairs = zip(shares_of(parts), left, strict=True)
        return all(abs(share * least / (size * parts) - 1) <= 0.08 for share, size in pairs)

    return lowest_terms(shares_of(next(filter(is_close, range(1, 17)), 16)))
