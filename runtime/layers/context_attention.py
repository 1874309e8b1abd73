"""Softmax attention over a cache that the ranks of the cp axis share out.

Sequences that every rank computes whole: each rank attends to what it keeps, and what the ranks found is merged.
Sequences that are shared out: each rank attends with its own queries to all keys. Those of the step's new tokens are
gathered (they are few, a step being bounded); those of earlier ones come from the ranks that keep them. On GPUs the
prefill kernel does that, over all keys in one piece of memory, as long as they are not too many for that.

Shapes: t tokens of this rank, T of the step, S sequences, q and kv heads, G = q / kv, m kept tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.nn.functional as F

from ...shardplan.config import Attention as AttentionConfig
from ..batch import upload
from ..cache_layout import CacheGroup
from ..context_batch import ContextBatch
from ..kernels import use_kernels
from ..parallel.attention import (
    GATHER_BYTES,
    NOWHERE,
    KeyPart,
    Partial,
    Visibility,
    across_ranks,
    attend,
    attend_to_part,
    exchange,
    with_sinks,
)

KERNEL_BYTES = 1 << 30
"""Keys and values of one sequence and layer that are brought together for the kernel; more go round the ring."""


class ContextAttention:
    """One layer's attention for this rank's heads and tokens."""

    def __init__(self, index: int, config: AttentionConfig, sinks: torch.Tensor | None) -> None:
        self.index, self.config, self.sinks = index, config, sinks

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: ContextBatch
    ) -> torch.Tensor:
        """q [t, q, D], k and v [t, kv, D] (None: another layer has written them) -> [t, q*D]"""
        new = None
        if k is not None and v is not None:
            new = batch.gather_tokens(torch.stack([k, v]), dim=1)
            batch.cache.write(self.index, new[0, batch.kept], new[1, batch.kept], batch.slots)
        heads = batch.cache.layer(self.index)[0].shape[2]
        outputs = []
        if batch.num_copied:
            outputs.append(_ungrouped(self._whole(_grouped(q[: batch.num_copied], heads), batch)))
        begin, first_new = batch.num_copied, batch.num_copied
        for s in range(batch.num_whole, len(batch.query_lens)):
            own, every = batch.query_lens[s], batch.kv_lens[s] - batch.starts[s]
            of_step = None if new is None else new[:, first_new : first_new + every]
            rows = slice(begin, begin + own)
            if self._suits_kernel(q, s, batch):
                outputs.append(self._by_kernel(q[rows], s, of_step, batch))
            else:
                grouped, of_step = _grouped(q[rows], heads), None if of_step is None else of_step.transpose(1, 2)
                outputs.append(_ungrouped(self._shared(grouped, s, batch.positions[rows], of_step, batch)))
            begin, first_new = begin + own, first_new + every
        return torch.cat(outputs)

    def _whole(self, q: torch.Tensor, batch: ContextBatch) -> torch.Tensor:
        """[kv, G, n, D] of the sequences that every rank computes -> the same."""
        found = self._decode(q, batch) if batch.decode_only else self._in_turn(q, batch)
        merged = across_ranks(found, batch.communicator)
        out = merged.out if self.sinks is None else with_sinks(merged, self.sinks.view(q.shape[:2]))
        return out.to(q.dtype)

    def _decode(self, q: torch.Tensor, batch: ContextBatch) -> Partial:
        """One token a sequence: many sequences at once, padded to the longest of them."""
        q, found = q.permute(2, 0, 1, 3).unsqueeze(3), []
        for rows in self._bounded(batch):
            part = self._kept(rows, min(batch.starts[rows]), max(batch.kv_lens[rows]), batch)
            visible = Visibility(batch.positions[rows].unsqueeze(1), self.config.window)
            found.append(attend_to_part(q[rows], visible, part, self.config.scaling))
        out, lse = (torch.cat(parts).squeeze(3) for parts in zip(*found, strict=True))
        return Partial(out.permute(1, 2, 0, 3), lse.permute(1, 2, 0))

    def _bounded(self, batch: ContextBatch) -> list[slice]:
        """Runs of sequences whose kept keys and values are at most GATHER_BYTES, or those of one sequence."""
        first, last = self._blocks(min(batch.starts), max(batch.kv_lens), batch)
        block = 2 * batch.cache.layer(self.index)[0][0].nbytes
        size = max(1, GATHER_BYTES // max(1, block * (last - first)))
        return [slice(begin, begin + size) for begin in range(0, len(batch.starts), size)]

    def _in_turn(self, q: torch.Tensor, batch: ContextBatch) -> Partial:
        """Sequences of any lengths, one by one."""
        found, begin = [], 0
        for s, count in enumerate(batch.query_lens[: batch.num_whole]):
            keys, values, at = self._kept(slice(s, s + 1), batch.starts[s], batch.kv_lens[s], batch)
            visible = Visibility(batch.positions[begin : begin + count], self.config.window)
            part = KeyPart(keys[0], values[0], at)
            found.append(attend_to_part(q[:, :, begin : begin + count], visible, part, self.config.scaling))
            begin += count
        return Partial(torch.cat([f.out for f in found], dim=2), torch.cat([f.lse for f in found], dim=2))

    def _shared(
        self, q: torch.Tensor, s: int, positions: torch.Tensor, new: torch.Tensor | None, batch: ContextBatch
    ) -> torch.Tensor:
        """[kv, G, n, D] of this rank's tokens of sequence `s`, at `positions` [n] -> the same.

        `new` [2, kv, .., D]: keys and values of all of the sequence's new tokens; None: they are in the cache alone.
        """
        start, stop = batch.starts[s], batch.kv_lens[s]
        parts: Iterable[KeyPart] = ()
        if new is not None:
            parts, stop = [KeyPart(new[0], new[1], torch.arange(start, stop, device=q.device))], start
        if self._group(batch).first_needed(start) < stop:
            keys, values, _ = self._kept(slice(s, s + 1), start, stop, batch)
            held = [self._positions(rank, start, stop, batch) for rank in range(batch.communicator.size)]
            parts = chain(parts, exchange(keys[0], values[0], held, batch.communicator))
        sinks = None if self.sinks is None else self.sinks.view(q.shape[:2])
        return attend(q, Visibility(positions, self.config.window), parts, self.config.scaling, sinks)

    def _suits_kernel(self, q: torch.Tensor, s: int, batch: ContextBatch) -> bool:
        """Whether the kernel can take sequence `s`: where there are kernels, and memory for all its keys at once."""
        keys = batch.cache.layer(self.index)[0]
        first, last = self._blocks(batch.starts[s], batch.kv_lens[s], batch)
        return use_kernels(q) and 2 * keys[0].nbytes * batch.communicator.size * (last - first) <= KERNEL_BYTES

    def _by_kernel(self, q: torch.Tensor, s: int, new: torch.Tensor | None, batch: ContextBatch) -> torch.Tensor:
        """q [n, q, D] of this rank's tokens of sequence `s` -> [n, q*D]. `new` [2, .., kv, D] as for `_shared`.

        To the kernel, the two pieces that a rank has are two sequences with the same keys, of which each ends with its
        piece: later keys it does not look at.
        """
        from ..kernels.decode_attention import Softmax
        from ..kernels.prefill_attention import prefill_attention

        start, size = batch.starts[s], batch.cache.block_size
        if new is not None and self._group(batch).first_needed(start) >= start:
            first, blocks = start, F.pad(new, (0, 0, 0, 0, 0, -new.shape[1] % size)).unflatten(1, (-1, size))
        else:
            first, blocks = self._whole_cache(s, batch)
        pieces = batch.layouts[s - batch.num_whole].pieces[batch.communicator.rank]
        lengths = [end - begin for begin, end in pieces]
        numbers = [0, lengths[0], len(q), *(start + end - first for _, end in pieces), 0, 0, *range(blocks.shape[1])]
        starts, kv_lens, rows, table = upload(numbers, q.device).split([3, 2, 2, blocks.shape[1]])
        softmax = Softmax(self.config.scaling, window=self.config.window or 0, sinks=self.sinks)
        cache = blocks[0], blocks[1]
        return prefill_attention(q, cache, table.unsqueeze(0), rows, starts, kv_lens, max(lengths), softmax)

    def _whole_cache(self, s: int, batch: ContextBatch) -> tuple[int, torch.Tensor]:
        """Every rank's blocks of sequence `s` that its new tokens can see, in order: [2, blocks, S, kv, D].

        And the position of the first token in them.
        """
        first, last = self._blocks(batch.starts[s], batch.kv_lens[s], batch)
        keys, values, group = batch.cache.layer(self.index)
        table = batch.tables[group][s, first:last]
        ranks = batch.communicator.all_gather(torch.stack([keys[table], values[table]]))
        blocks = ranks.movedim(0, 2).flatten(1, 2)  # block by block, each rank's part of it in turn
        return first * batch.cache.block_size * batch.communicator.size, blocks

    def _kept(self, rows: slice, start: int, stop: int, batch: ContextBatch) -> KeyPart:
        """What this rank keeps of tokens before `stop` that a query at `start` or later can see: [S, kv, m, D]."""
        keys, values, group = batch.cache.layer(self.index)
        first, last = self._blocks(start, stop, batch)
        tables = batch.tables[group][rows, first:last]
        keys, values = (cache[tables].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
        return KeyPart(keys, values, self._positions(batch.communicator.rank, start, stop, batch))

    def _positions(self, rank: int, start: int, stop: int, batch: ContextBatch) -> torch.Tensor:
        """[m]: where the tokens are that `rank` keeps, as `_kept` has them."""
        size, num_ranks, device = batch.cache.block_size, batch.communicator.size, batch.positions.device
        first, last = self._blocks(start, stop, batch)
        runs = torch.arange(first, last, device=device) * num_ranks + rank
        at = (runs.unsqueeze(1) * size + torch.arange(size, device=device)).flatten()
        return at.masked_fill(at >= stop, NOWHERE)

    def _blocks(self, start: int, stop: int, batch: ContextBatch) -> tuple[int, int]:
        span = batch.cache.block_size * batch.communicator.size
        return self._group(batch).first_needed(start) // span, -(-stop // span)

    def _group(self, batch: ContextBatch) -> CacheGroup:
        return batch.cache.groups[batch.cache.layer(self.index)[2]]


def _grouped(q: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, q, D] -> [kv, G, n, D]"""
    return q.view(len(q), heads, -1, q.shape[-1]).permute(1, 2, 0, 3)


def _ungrouped(out: torch.Tensor) -> torch.Tensor:
    """[kv, G, n, D] -> [n, q*D]"""
    return out.permute(2, 0, 1, 3).flatten(1)
