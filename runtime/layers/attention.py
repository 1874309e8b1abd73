"""Softmax attention over the blocked KV cache, with torch's own operations: the path for CPUs and the reference.

Shapes: T tokens, S sequences, q and kv the heads of this rank, G = q / kv, L cached tokens, D head dimension.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ...shardplan.config import Attention as AttentionConfig
from ..batch import ForwardBatch
from ..context_batch import ContextBatch
from ..paged import PagedBatch
from .context_attention import ContextAttention

if TYPE_CHECKING:
    from .paged_attention import PagedAttention


class CachedAttention:
    """Attention of one layer for this rank's heads: writes the new keys and values, then attends to the cache."""

    def __init__(self, index: int, config: AttentionConfig, sinks: torch.Tensor | None = None) -> None:
        self.index, self.config, self.sinks = index, config, sinks

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """q [T, q, D], k and v [T, kv, D] (None: another layer has written them) -> [T, q*D]"""
        if isinstance(batch, ContextBatch):
            return self.over_context(q, k, v, batch)
        if k is not None and v is not None:
            batch.cache.write(self.index, k, v, batch.slots)
        if isinstance(batch, PagedBatch):
            return self.paged(q, batch)
        if batch.decode_only:
            return self._decode(q, batch)
        outputs, begin = [], 0
        for s, count in enumerate(batch.query_lens):
            outputs.append(self._sequence(q[begin : begin + count], s, batch))
            begin += count
        return torch.cat(outputs).flatten(1)

    @cached_property
    def paged(self) -> PagedAttention:
        """The same by kernels, for batches that are meant for them."""
        from .paged_attention import PagedAttention

        return PagedAttention(self.index, self.config, self.sinks)

    @cached_property
    def over_context(self) -> ContextAttention:
        """The same where the ranks of the cp axis share out tokens and cache."""
        return ContextAttention(self.index, self.config, self.sinks)

    def _decode(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """One token a sequence: all sequences at once, padded to the longest."""
        keys, values, group = batch.cache.layer(self.index)
        tables, mask = self._decode_view(batch, group)
        kv, d = keys.shape[2:]
        # The G query heads of a kv head are its "queries": no key is repeated.
        q = q.view(len(q), kv, -1, d)
        k, v = (_gather(cache, tables) for cache in (keys, values))
        return self._attend(q, k, v, mask).flatten(1)

    def _decode_view(self, batch: ForwardBatch, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tables cut to the blocks in use, mask [S, 1, 1, L]), worked out once a step and group."""
        key = ("decode", group, self.config.window)
        if key not in batch.scratch:
            size = batch.cache.block_size
            window = self.config.window
            first = min(batch.cache.groups[group].first_needed(n - 1) for n in batch.kv_lens) // size
            last = -(-max(batch.kv_lens) // size)
            lens = torch.tensor(batch.kv_lens, device=batch.positions.device).view(-1, 1, 1, 1)
            at = torch.arange(first * size, last * size, device=batch.positions.device)
            mask = at < lens
            if window is not None:
                mask = mask & (at >= lens - window)
            batch.scratch[key] = batch.tables[group][:, first:last], mask
        return batch.scratch[key]

    def _sequence(self, q: torch.Tensor, s: int, batch: ForwardBatch) -> torch.Tensor:
        """[n, q, D] of sequence `s` -> [n, q, D]"""
        keys, values, group = batch.cache.layer(self.index)
        size, length = batch.cache.block_size, batch.kv_lens[s]
        start = length - len(q)
        first = batch.cache.groups[group].first_needed(start) // size
        table = batch.tables[group][s : s + 1, first : -(-length // size)]
        k, v = (_gather(cache, table)[:, :, : length - first * size] for cache in (keys, values))
        mask = self._causal_mask(start, length, first * size, batch)
        groups = q.shape[1] // k.shape[1]
        q = q.transpose(0, 1).unsqueeze(0)
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return self._attend(q, k, v, mask)[0].transpose(0, 1)

    def _causal_mask(self, start: int, stop: int, first: int, batch: ForwardBatch) -> torch.Tensor:
        """[queries start..stop, keys first..stop], true where visible."""
        key = ("causal", start, stop, first, self.config.window)
        if key not in batch.scratch:
            device = batch.positions.device
            query, at = torch.arange(start, stop, device=device).unsqueeze(1), torch.arange(first, stop, device=device)
            mask = at <= query
            if self.config.window is not None:
                mask = mask & (at > query - self.config.window)
            batch.scratch[key] = mask
        return batch.scratch[key]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scaling = self.config.scaling
        if self.sinks is None and q.dtype != torch.float64:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        return _explicit_attention(q, k, v, mask, scaling, self.sinks)


def _gather(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[B, size, kv, D] at tables [S, n] -> [S, kv, n*size, D]"""
    blocks = cache[tables]
    return blocks.flatten(1, 2).transpose(1, 2)


def _explicit_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention step by step as transformers' eager form: scores in the model's dtype, softmax in float32.

    `sinks` [heads] are extra logits that take part in the softmax and are dropped after it.
    """
    scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~mask, torch.finfo(q.dtype).min)
    if sinks is not None:
        column = sinks.view(1, k.shape[1], -1, 1) if q.shape[1] == k.shape[1] != len(sinks) else sinks.view(1, -1, 1, 1)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1).to(scores.dtype)], dim=-1)
        weights = F.softmax(scores - scores.amax(-1, keepdim=True), dim=-1, dtype=scores.dtype)[..., :-1]
    else:
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v
