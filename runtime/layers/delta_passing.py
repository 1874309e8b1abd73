"""What a delta net needs of the pieces before its own, in a sequence that ranks share out.

Shapes: n tokens of this rank, K width of the convolution, C its channels, h heads, dk and dv dimensions of the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..communicator import Communicator
from ..parallel.ranges import Range, SequenceLayout
from ..parallel.sequence import gather_parts
from .delta_rule import PreparedChunks, run_chunks


class PassedAlong:
    """The pieces of one sequence in their order, each with the rank that has it."""

    def __init__(self, layout: SequenceLayout, communicator: Communicator) -> None:
        self.layout, self.communicator = layout, communicator
        owned = [(piece, rank) for rank, pieces in enumerate(layout.pieces) for piece in pieces]
        self.pieces: list[tuple[Range, int]] = sorted(owned)

    def inputs_before(self, x: torch.Tensor, history: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Of x [n, C] and the K - 1 inputs before the sequence, `history`: those before each of this rank's pieces.

        And those before what will follow. Only each piece's last K - 1 inputs are exchanged.
        """
        history = history.clone()  # the caller's is written to meanwhile
        width, own = len(history), self.layout.pieces[self.communicator.rank]
        parts = x.split([stop - start for start, stop in own])
        ends = torch.cat([part[-width:] for part in parts])
        sizes = [sum(_end(piece, width) for piece in pieces) for pieces in self.layout.pieces]
        every = gather_parts(ends, sizes, self.communicator).split(
            [_end(piece, width) for pieces in self.layout.pieces for piece in pieces]
        )
        by_start = dict(zip((start for pieces in self.layout.pieces for start, _ in pieces), every, strict=True))
        before: dict[int, torch.Tensor] = {}
        for (start, _), _ in self.pieces:
            before[start] = history
            history = torch.cat([history, by_start[start]])[-width:]
        return [before[start] for start, _ in own], history

    def states(
        self, prepared: Sequence[PreparedChunks], state: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Outputs [h, .., dv] of this rank's pieces, given as `prepared`, and the state [h, dk, dv] after all pieces.

        In turn: whoever has the next piece takes the state through it and tells the others.
        """
        mine, outputs, state = iter(prepared), [], state.clone()
        for _, rank in self.pieces:
            if rank == self.communicator.rank:
                out, state = run_chunks(next(mine), state)
                outputs.append(out)
            state = self.communicator.broadcast(state.contiguous(), rank)
        return outputs, state


def _end(piece: Range, width: int) -> int:
    """How many inputs of a piece are exchanged."""
    return min(piece[1] - piece[0], width)
