"""Random numbers without a state: the same (seed, position) gives the same number on any device, in any batch.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), on integer tensors. 32-bit words
are held in int64, which every device has; no product exceeds 2**49, so nothing overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words [S] from four counter words [S] and two key words [S], each an int64 tensor of 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 [S], for `seeds` and `positions`, int64 [S] (their 64 bits, signed or not)."""
    zero = torch.zeros_like(positions)
    counter = (positions & _WORD, (positions >> 32) & _WORD, zero, zero)
    first, second, _, _ = philox4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    # 53 bits, all that a float64 below 1 can hold.
    return ((first >> 5) * (1 << 26) + (second >> 6)).to(torch.float64) * 2.0**-53


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """(high, low) words of the 64-bit products, by halves, because an int64 product would overflow."""
    low_half = (words & 0xFFFF) * factor
    high_half = (words >> 16) * factor + (low_half >> 16)
    return high_half >> 16, ((high_half & 0xFFFF) << 16) | (low_half & 0xFFFF)
