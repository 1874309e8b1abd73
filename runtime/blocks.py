"""Who holds which block of the KV cache, and which blocks can be found again by what is in them. No torch.

A block is free, or held by one or more sequences. Full blocks are known by a hash of all tokens up to their end, so that a
sequence with the same beginning can hold them too; they stay findable after they were freed, until they are needed
for something else, the longest unused first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from .cache_layout import CacheGroup

SCRATCH_BLOCK = 0
"""Block that nobody holds: stands in tables for blocks that have left a window."""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: 128 bits of its tokens and of everything before them."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """The blocks of one cache group."""

    def __init__(self, group: CacheGroup, num_blocks: int, block_size: int) -> None:
        self.group, self.block_size, self.num_blocks = group, block_size, num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, findable ones included."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block]

    def missing(self, table: list[int], num_tokens: int) -> int:
        """How many blocks `table` lacks to hold tokens [0, num_tokens)."""
        return max(0, -(-num_tokens // self.block_size) - len(table))

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Allocate what `missing` counts; the caller has checked that there are enough."""
        for _ in range(self.missing(table, num_tokens)):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            table.append(block)

    def name(self, block: int, digest: bytes) -> None:
        """Make a full block findable. The first block of a name keeps it."""
        if digest not in self._block_of and block not in self._hash_of and block != SCRATCH_BLOCK:
            self._hash_of[block], self._block_of[digest] = digest, block

    def usable_prefix(self, digests: Sequence[bytes], count: int) -> bool:
        """Whether all that a query after `count` blocks can see of them can be found."""
        first = self.group.first_needed(count * self.block_size) // self.block_size
        return all(digest in self._block_of for digest in digests[first:count])

    def adopt(self, table: list[int], digests: Sequence[bytes], count: int) -> int:
        """Hold the blocks that `usable_prefix` promised; returns how many free ones it took."""
        first = self.group.first_needed(count * self.block_size) // self.block_size
        table += [SCRATCH_BLOCK] * first + [self._block_of[d] for d in digests[first:count]]
        before = len(self._free)
        for block in table[first:]:
            self._holders[block] += 1
            self._free.pop(block, None)
        return before - len(self._free)

    def drop_unseen(self, table: list[int], position: int) -> None:
        """Let go of the blocks that no query at `position` or later can see."""
        for i in range(min(self.group.first_needed(position) // self.block_size, len(table)) - 1, -1, -1):
            if table[i] == SCRATCH_BLOCK:
                break
            self._let_go(table[i])
            table[i] = SCRATCH_BLOCK

    def release(self, table: list[int]) -> None:
        """Let go of every block of `table` and empty it; its end is the first to be reused."""
        for block in reversed(table):
            if block != SCRATCH_BLOCK:
                self._let_go(block)
        table.clear()

    def forget_all(self) -> None:
        """Make no block findable any more."""
        self._hash_of.clear()
        self._block_of.clear()

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free[block] = None
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
