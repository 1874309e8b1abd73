"""The block tables of all slots on the device, kept up to date by sending only what has changed."""

from __future__ import annotations

import torch

from .batch import upload
from .messages import SequenceStep


class BlockTables:
    """Per cache group a table int32 [slots + 1, blocks]; the last row, for padding, holds scratch blocks for good."""

    def __init__(self, num_groups: int, num_slots: int, blocks: int, device: torch.device) -> None:
        self.device = device
        self._all = torch.zeros((num_groups, num_slots + 1, blocks), dtype=torch.int32, device=device)
        self._known: list[list[list[int]]] = [[[] for _ in range(num_slots + 1)] for _ in range(num_groups)]

    @property
    def groups(self) -> list[torch.Tensor]:
        """The tables, one a group."""
        return list(self._all)

    def update(self, sequences: list[SequenceStep]) -> None:
        """Bring the rows of `sequences` up to date."""
        _, rows, blocks = self._all.shape
        places: list[int] = []
        values: list[int] = []
        for s in sequences:
            for g, table in enumerate(s.tables):
                known = self._known[g][s.slot]
                if table == known:
                    continue
                begin = len(known) if table[: len(known)] == known else 0
                first = (g * rows + s.slot) * blocks
                places += range(first + begin, first + len(table))
                values += table[begin:]
                self._known[g][s.slot] = table
        if places:
            changes = upload(places + values, self.device)
            self._all.view(-1)[changes[: len(places)].long()] = changes[len(places) :]
