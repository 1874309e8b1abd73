"""Who owns which block of the KV cache. Pure bookkeeping: no torch."""

from __future__ import annotations

from .cache_layout import CacheGroup

SCRATCH_BLOCK = 0
"""Block that nobody owns: stands in tables for blocks that have left a window."""


class BlockPool:
    """The blocks of one cache group. Every block is either free or owned by exactly one sequence."""

    def __init__(self, group: CacheGroup, num_blocks: int, block_size: int) -> None:
        self.group, self.block_size, self.num_blocks = group, block_size, num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def missing(self, table: list[int], num_tokens: int) -> int:
        """How many blocks `table` lacks to hold tokens [0, num_tokens)."""
        return max(0, -(-num_tokens // self.block_size) - len(table))

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Allocate what `missing` counts; the caller has checked that there are enough."""
        for _ in range(self.missing(table, num_tokens)):
            table.append(self._free.pop())

    def drop_unseen(self, table: list[int], position: int) -> None:
        """Free the blocks that no query at `position` or later can see."""
        for i in range(min(self.group.first_needed(position) // self.block_size, len(table)) - 1, -1, -1):
            if table[i] == SCRATCH_BLOCK:
                break
            self._free.append(table[i])
            table[i] = SCRATCH_BLOCK

    def release(self, table: list[int]) -> None:
        """Free every block of `table` and empty it."""
        self._free += [block for block in reversed(table) if block != SCRATCH_BLOCK]
        table.clear()
