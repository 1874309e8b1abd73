"""What a step must do at least, whatever computes it: bytes to read, arithmetic; and how such figures are written."""

from __future__ import annotations

import math
import re

from ...shardplan.config import ModelConfig
from ..cache_layout import cache_groups, kv_shape

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def step_bytes(model: ModelConfig, plan, batch: int, context: int, cp_size: int = 1) -> int:
    """Bytes that the rank with the most to do must read in a decode step: its weights once, and all tokens it caches.

    Of experts those that `batch` tokens choose, if each is as likely as the others.
    """
    axes = plan.shared_axes()
    most = 0
    for rank in plan.ranks:
        sizes = {t.name: t.bytes for t in rank.tensors if t.source is not None}
        used = sum(int(size * _part_used(model, name, batch)) for name, size in sizes.items())
        weights = used - (0 if model.tie_word_embeddings else sizes.get(EMBEDDING, 0))
        item = sizes[EMBEDDING] // max(1, _elements(rank, EMBEDDING))
        cached = 0
        for group in cache_groups(model):
            seen = context if group.window is None else min(context, group.window)
            for layer in group.layers:
                heads, dim = kv_shape(model, axes, rank.rank, layer)
                cached += 2 * heads * dim * seen * item
        most = max(most, weights + batch * cached // cp_size)
    return most


def prefill_flops(model: ModelConfig, plan, requests: int, tokens: int) -> float:
    """Floating-point operations of the slowest rank: two a weight and token (head: once a request), and attention.

    A token has as many experts as it chooses.
    """
    most = 0.0
    for rank in plan.ranks:
        elements = {t.name: _elements(rank, t.name) for t in rank.tensors if t.source is not None}
        head = elements.pop(HEAD, 0) or elements.get(EMBEDDING, 0)
        elements.pop(EMBEDDING, 0)
        weights = sum(count * _part_used(model, name, 1) for name, count in elements.items())
        attention = 0.0
        for layer in model.layers:
            if layer.attention is not None:
                a = layer.attention
                seen = tokens if a.window is None else min(tokens, 2 * a.window)
                attention += 2 * tokens * seen * a.num_heads * a.head_dim / plan.tp_size
        most = max(most, requests * (2.0 * weights * tokens + 2.0 * head + attention))
    return most


def _part_used(model: ModelConfig, name: str, num_tokens: int) -> float:
    """How much of a tensor `num_tokens` tokens need: all of it, but for experts, which each of them chooses evenly."""
    found = re.search(r"\.layers\.(\d+)\..*\.experts\.", name)
    if found is None:
        return 1.0
    ffn = model.layers[int(found[1])].ffn
    return 1.0 - (1.0 - ffn.experts_per_token / ffn.num_experts) ** num_tokens


def metric(value: float, unit: str) -> str:
    """'4.21 TB/s', '195 GFLOP/s': three significant digits."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    raise AssertionError


def _elements(rank, name: str) -> int:
    """Elements that a rank holds of a tensor."""
    return next(math.prod(t.shape) for t in rank.tensors if t.name == name)
