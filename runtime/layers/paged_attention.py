"""Attention by the kernels of runtime/kernels: one token a sequence, many, or both in one step.

Shapes: T tokens, q and kv the heads of this rank, D head dimension.
"""

from __future__ import annotations

import torch

from ...shardplan.config import Attention as AttentionConfig
from ..kernels.decode_attention import Softmax, decode_attention
from ..kernels.prefill_attention import prefill_attention
from ..kernels.rotary import HeadNorm, rotate_and_write
from ..paged import PagedBatch
from .norm import RMSNorm


class PagedAttention:
    """One layer's attention over the blocked cache."""

    def __init__(self, index: int, config: AttentionConfig, sinks: torch.Tensor | None) -> None:
        self.index, self.config = index, config
        self.softmax = Softmax(config.scaling, window=config.window or 0, sinks=sinks)

    def __call__(self, q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """q [T, q, D], rotated, its keys and values being in the cache -> [T, q*D]"""
        keys, values, group = batch.cache.layer(self.index)
        cache, paged = (keys, values), batch.paged
        table, count, prefill = paged.tables[group], paged.num_decode, paged.prefill
        parts = []
        if count:
            at = (paged.rows[:count], paged.positions[:count], paged.counters)
            parts.append(decode_attention(q[:count], cache, table, *at, self.softmax))
        if prefill is not None:
            at = (prefill.rows, prefill.starts, prefill.kv_lens, prefill.longest)
            parts.append(prefill_attention(q[count:], cache, table, *at, self.softmax))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def from_projection(
        self, qkv: torch.Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None, batch: PagedBatch
    ) -> torch.Tensor:
        """qkv [T, (q + 2 kv) D] as projected: norm heads, rotate, write keys and values, attend -> [T, q*D]"""
        norms = None if q_norm is None or k_norm is None else (_head_norm(q_norm), _head_norm(k_norm))
        keys, values, group = batch.cache.layer(self.index)
        cache, paged = (keys, values), batch.paged
        table, rotation = paged.tables[group], batch.rotation(self.config.rope)
        if paged.prefill is None:
            at = (paged.rows, paged.positions, paged.counters)
            return decode_attention(qkv, cache, table, *at, self.softmax, rotation, norms)
        q = rotate_and_write(qkv, cache, table, paged.rows, paged.positions, rotation, norms)
        return self(q, batch)


def _head_norm(norm: RMSNorm) -> HeadNorm:
    assert norm.weight is not None
    return HeadNorm(norm.weight, norm.eps, norm.one_plus, norm.cast_first)
