"""Attention by the kernels of runtime/kernels: one token a sequence, many, or both in one step.

Shapes: T tokens, q and kv the heads of this rank, D head dimension.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...shardplan.config import Attention as AttentionConfig
from ..kernels.decode_attention import CachePart, Softmax, decode_attention, merged
from ..kernels.prefill_attention import prefill_attention
from ..kernels.prompt_attention import prompt_attention, prompt_tiling
from ..kernels.rotary import HeadNorm, Rotation, rotate_and_write
from ..paged import PagedBatch
from .norm import RMSNorm


class PagedAttention:
    """One layer's attention over the blocked cache."""

    def __init__(self, index: int, config: AttentionConfig, sinks: torch.Tensor | None) -> None:
        self.index, self.config = index, config
        self.softmax = Softmax(config.scaling, window=config.window or 0, sinks=sinks)

    def __call__(self, q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """q [T, q, D], rotated, its keys and values being in the cache -> [T, q*D]"""
        count, parts = batch.paged.num_decode, []
        if count:
            parts.append(self._decode(q[:count], batch))
        if batch.paged.prefill is not None:
            parts.append(self._prefill(q[count:], batch))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def from_projection(
        self, qkv: torch.Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None, batch: PagedBatch
    ) -> torch.Tensor:
        """qkv [T, (q + 2 kv) D] as projected: norm heads, rotate, write keys and values, attend -> [T, q*D]"""
        norms = None if q_norm is None or k_norm is None else (_head_norm(q_norm), _head_norm(k_norm))
        rotation, paged = batch.rotation(self.config.rope), batch.paged
        count, parts = paged.num_decode, []
        if count:  # in a mixed step by the kernel of a decode step, which is compiled already
            parts.append(self._decode(qkv[:count], batch, rotation, norms))
        if paged.prefill is not None:
            parts.append(self._prefill_from_projection(qkv[count:], batch, rotation.after(count), norms))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self,
        q: torch.Tensor,
        batch: PagedBatch,
        rotation: Rotation | None = None,
        norms: tuple[HeadNorm, HeadNorm] | None = None,
    ) -> torch.Tensor:
        """The sequences of one token, which come first in a step."""
        keys, values, group = batch.cache.layer(self.index)
        paged, count = batch.paged, q.shape[0]
        at = (paged.rows[:count], paged.positions[:count], paged.counters)
        places = (q, (keys, values), paged.tables[group], *at)
        context = paged.context
        if context.size == 1:
            return decode_attention(*places, self.softmax, rotation, norms)
        softmax = self.softmax if context.rank == 0 else replace(self.softmax, sinks=None)
        part = CachePart(context.rank, context.size)
        return merged(context.all_gather(decode_attention(*places, softmax, rotation, norms, part=part)), q.dtype)

    def _prefill_from_projection(
        self, qkv: torch.Tensor, batch: PagedBatch, rotation: Rotation, norms: tuple[HeadNorm, HeadNorm] | None
    ) -> torch.Tensor:
        keys, values, group = batch.cache.layer(self.index)
        paged, prefill, count = batch.paged, batch.paged.prefill, batch.paged.num_decode
        assert prefill is not None
        tiling = prompt_tiling(qkv.device, qkv.dtype, keys.shape[-1]) if prefill.whole else None
        at = (paged.tables[group], paged.rows[count:], paged.positions[count:])
        rotated = rotate_and_write(qkv, (keys, values), *at, rotation, norms, keys_too=tiling is not None)
        if tiling is None:
            return self._prefill(rotated, batch)
        return prompt_attention(rotated, qkv, keys.shape[-2], prefill.starts, prefill.longest, self.softmax, tiling)

    def _prefill(self, q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """The sequences of several tokens."""
        keys, values, group = batch.cache.layer(self.index)
        paged, prefill = batch.paged, batch.paged.prefill
        assert prefill is not None
        at = (prefill.rows, prefill.starts, prefill.kv_lens, prefill.longest)
        return prefill_attention(q, (keys, values), paged.tables[group], *at, self.softmax)


def _head_norm(norm: RMSNorm) -> HeadNorm:
    assert norm.weight is not None
    return HeadNorm(norm.weight, norm.eps, norm.one_plus, norm.cast_first)
