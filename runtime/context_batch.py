"""A step as one of several ranks on the cp axis computes it: some of its tokens, over a part of the cache.

Sequences with several new tokens are shared out, head and tail, so that causal work is even. Those with few, as in
decode steps, every rank computes whole: there would be nothing to share. The cache is shared out by position: a block
spans `block_size` tokens of every rank, and rank r keeps the r-th run of them. So one table serves all ranks, and to
the scheduler a block is simply larger.

Shapes: T tokens of the step, t of this rank, L tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .batch import ForwardBatch
from .communicator import Communicator
from .messages import SequenceStep
from .parallel.ranges import SequenceLayout, head_and_tail, one_after_another
from .parallel.sequence import gather_sequence, own_positions, restored_order


def is_shared(num_tokens: int, num_ranks: int) -> bool:
    """Whether a sequence has enough new tokens for every rank to have some of its head and some of its tail."""
    return num_tokens >= 2 * num_ranks


def shared_last(sequences: Sequence[SequenceStep], num_ranks: int) -> list[SequenceStep]:
    """The order in which a ContextBatch has its sequences."""
    return sorted(sequences, key=lambda s: is_shared(s.num_tokens, num_ranks))


@dataclass(kw_only=True)
class ContextBatch(ForwardBatch):
    """What this rank does of a step. `query_lens` count its own tokens, `kv_lens` whole sequences.

    The first `num_copied` tokens every rank has; `layout` says who has which of the T - num_copied others, which are
    those of the last sequences, each laid out as `layouts` say. `slots` are those of the tokens that this rank keeps,
    `kept` [..] of all T; `starts` the first new position of every sequence.
    """

    communicator: Communicator
    num_copied: int
    layout: SequenceLayout
    layouts: list[SequenceLayout]
    order: torch.Tensor
    kept: torch.Tensor
    starts: list[int]
    num_logits: int
    logit_places: torch.Tensor | None  # where this rank's logit rows go among all; None: every rank has all of them

    @property
    def num_whole(self) -> int:
        """Sequences that every rank computes."""
        return len(self.query_lens) - len(self.layouts)

    def gather_tokens(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[.., t, ..] -> [.., T, ..]: what all ranks have of the step, on every rank."""
        if not self.layouts:
            return x
        copied, own = x.split([self.num_copied, x.shape[dim] - self.num_copied], dim)
        return torch.cat([copied, gather_sequence(own, self.layout, self.communicator, dim, self.order)], dim)

    def logit_rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[t, H] -> [L, H] on every rank: the tokens whose logits are wanted, from the rank that has each."""
        own = x[self.logit_rows]
        if self.logit_places is None:
            return own
        # A sum of one number and zeros is that number.
        return self.communicator.all_reduce(
            x.new_zeros(self.num_logits, x.shape[1]).index_copy_(0, self.logit_places, own)
        )


def context_batch(whole: ForwardBatch, communicator: Communicator) -> ContextBatch:
    """This rank's part of a step whose sequences are in the order of `shared_last`."""
    num_ranks, rank, device = communicator.size, communicator.rank, whole.positions.device
    layouts = [head_and_tail(n, num_ranks) for n in whole.query_lens if is_shared(n, num_ranks)]
    num_whole = len(whole.query_lens) - len(layouts)
    num_copied = sum(whole.query_lens[:num_whole])
    layout = one_after_another(layouts, num_ranks)
    rows = torch.cat([torch.arange(num_copied, device=device), num_copied + own_positions(layout, rank, device)])
    size = whole.cache.block_size
    kept = (whole.positions // size % num_ranks == rank).nonzero().squeeze(1)
    logit_rows, places, num_logits = _own_logit_rows(whole.logit_rows, rows, num_copied, rank)
    changed = {
        "token_ids": whole.token_ids[rows],
        "positions": whole.positions[rows],
        "rope_lengths": whole.rope_lengths[rows],
        "query_lens": whole.query_lens[:num_whole] + [part.sizes[rank] for part in layouts],
        "slots": [slots[kept] for slots in whole.slots],
        "logit_rows": logit_rows,
    }
    return ContextBatch(
        **{field.name: getattr(whole, field.name) for field in fields(ForwardBatch)} | changed,
        communicator=communicator,
        num_copied=num_copied,
        layout=layout,
        layouts=layouts,
        order=restored_order(layout, device),
        kept=kept,
        starts=[kv - new for kv, new in zip(whole.kv_lens, whole.query_lens, strict=True)],
        num_logits=num_logits,
        logit_places=places,
    )


def _own_logit_rows(
    wanted: torch.Tensor | slice, rows: torch.Tensor, num_copied: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(which of this rank's tokens are wanted, where they go among all wanted ones, how many are wanted in all)."""
    assert isinstance(wanted, torch.Tensor)
    if bool((wanted < num_copied).all()):
        return wanted, None, len(wanted)
    hits = wanted.unsqueeze(1) == rows.unsqueeze(0)
    if rank > 0:  # what all ranks have is the first one's to give
        hits[:, :num_copied] = False
    places, own = hits.nonzero(as_tuple=True)
    return own, places, len(wanted)
