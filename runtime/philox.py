"""Random numbers without a state: the same (seed, position) gives the same number on any device, in any batch.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), on integer tensors: 32-bit words
held in int64, which every device has. It is written for few tensor operations, since S is small and each one costs a
kernel launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)  # of the words 2 and 0
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Random words [4, S] from counter words [4, S] and key words [2, S], all int64 with 32-bit values."""
    # A 32-bit factor less 2**32 is small and negative, so no product overflows; the high word gets the rest added.
    factors = _column(key, *(factor - (1 << 32) for factor in _MULTIPLIERS))
    rounds = torch.arange(_ROUNDS, device=key.device)[:, None, None]
    keys = (key + rounds * _column(key, *_KEY_STEPS)) & _WORD
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys.unbind():
        swapped = even.flip(0)
        products = swapped * factors
        even, odd = ((products >> 32) + swapped) ^ odd ^ round_key, products & _WORD
    return torch.stack([even, odd], dim=1).flatten(0, 1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 [S], for `seeds` and `positions`, int64 [S] (their 64 bits, signed or not)."""
    position, seed = _words(positions), _words(seeds)
    first, second, _, _ = philox4x32(torch.cat([position, torch.zeros_like(position)]), seed).unbind()
    # 53 bits, all that a float64 below 1 can hold.
    return ((first >> 5) * (1 << 26) + (second >> 6)).to(torch.float64) * 2.0**-53


def _words(values: Tensor) -> Tensor:
    """The low and the high words [2, S] of 64-bit values [S]."""
    return torch.stack([values, values >> 32]) & _WORD


def _column(like: Tensor, first: int, second: int) -> Tensor:
    """int64 [2, 1] of two constants, made on the device of `like`, without a copy from the host."""
    column = like.new_empty(2, 1)
    column[0].fill_(first)
    column[1].fill_(second)
    return column
