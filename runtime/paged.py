"""One step's work as the kernels want it: everything on the device, nothing that depends on Python lists.

Shapes: T tokens of S sequences, the first `num_decode` tokens being whole sequences of one token; R rows of the block
tables, one a slot and a last one for padding; L tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .batch import ForwardBatch
from .communicator import Communicator, SingleRank
from .kv_cache import KVCache
from .layers.rotary import RotaryTables
from .state_cache import StateCache

if TYPE_CHECKING:
    from ..shardplan.rope import Rope
    from .kernels.rotary import Rotation


@dataclass(frozen=True)
class PrefillInputs:
    """The P sequences with several new tokens: where each begins among them (int32), and the longest one's tokens.

    `whole`: nothing of any of them was cached before.
    """

    starts: torch.Tensor  # [P + 1], from 0
    rows: torch.Tensor  # [P]
    kv_lens: torch.Tensor  # [P]
    longest: int
    whole: bool


@dataclass(frozen=True)
class PagedInputs:
    """Where the tokens are: each one's position and row in the block tables (int32 [T]), and the tables [R, blocks].

    `counters` are for the attention kernel. `angles`: cos and sin [T, d] of ropes that depend on a sequence's length.
    `context`: the ranks that share out the cache; with several of them every token is the only new one of its sequence.
    """

    positions: torch.Tensor
    rows: torch.Tensor
    tables: list[torch.Tensor]
    counters: torch.Tensor
    num_decode: int
    prefill: PrefillInputs | None = None
    angles: dict[Rope, torch.Tensor] = field(default_factory=dict)
    context: Communicator = field(default_factory=SingleRank)


@dataclass(frozen=True)
class Stores:
    """What a rank keeps between steps."""

    cache: KVCache
    states: StateCache
    rotary: RotaryTables


class PagedBatch(ForwardBatch):
    """A ForwardBatch over PagedInputs. What only torch's own operations need is worked out when they ask for it."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        paged: PagedInputs,
        query_lens: list[int],
        logit_rows: torch.Tensor | slice,
        stores: Stores,
    ) -> None:
        self.token_ids, self.paged, self.query_lens, self.logit_rows = token_ids, paged, query_lens, logit_rows
        self.cache, self.states, self.rotary = stores.cache, stores.states, stores.rotary
        self.scratch = {}

    @cached_property
    def positions(self) -> torch.Tensor:  # type: ignore[override]
        """[T] int64"""
        return self.paged.positions.long()

    @cached_property
    def state_slots(self) -> torch.Tensor:  # type: ignore[override]
        """[S] int64"""
        rows, prefill = self.paged.rows[: self.paged.num_decode], self.paged.prefill
        return (rows if prefill is None else torch.cat([rows, prefill.rows])).long()

    @cached_property
    def slots(self) -> list[torch.Tensor]:  # type: ignore[override]
        """Per group [T] int64: where each token's key and value go; to the scratch block where others keep them."""
        size, rows, context = self.cache.block_size, self.paged.rows.long(), self.paged.context
        kept = self.positions // size % context.size == context.rank
        blocks = [table[rows, self.positions // (size * context.size)] for table in self.paged.tables]
        return [block.long() * kept * size + self.positions % size for block in blocks]

    def cos_sin(self, rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, d/2] of this step's positions in `dtype`, worked out once a step."""
        if (rope, dtype) not in self.scratch:
            angles = self.paged.angles.get(rope)
            rows = self.rotary.tables[rope][self.positions] if angles is None else angles
            self.scratch[rope, dtype] = rows.to(dtype).chunk(2, dim=-1)
        return self.scratch[rope, dtype]

    def rotation(self, rope: Rope) -> Rotation:
        """What the kernels need to rotate this step's tokens."""
        from .kernels.rotary import Rotation

        angles = self.paged.angles.get(rope)
        if angles is not None:
            return Rotation(angles, rope.interleaved, by_token=True)
        return Rotation(self.rotary.tables[rope], rope.interleaved)
