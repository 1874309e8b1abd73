"""Triton kernels for what torch leaves slow: the small steps between matrix products, and products with few tokens.

A module each for norm, activation, linear, rotary, attention of decode steps, of prompts and of whole prompts, sums and
gathers over ranks, penalties, argmax, draws by chance and the edges of top-k and top-p; tilings.py is how products are
cut, packets.py what ranks send each other. Every kernel computes what the torch operations of the same layer compute,
rounding less often.
Nothing here is imported on a CPU unless Triton's interpreter is asked for (TRITON_INTERPRET=1), which the tests do.

Shapes: T tokens, H hidden, D head dimension, kv the key/value heads of this rank, G query heads of each of them.
"""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels can run where `x` is, in its dtype."""
    return (x.is_cuda or INTERPRETED) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
