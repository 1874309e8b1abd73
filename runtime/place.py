"""Where a rank computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .communicator import Communicator, SingleRank


@dataclass(frozen=True)
class Place:
    """Where a rank computes: its device, and its communicators on the tp and the cp axis."""

    device: torch.device
    communicator: Communicator
    context: Communicator = field(default_factory=SingleRank)

    @property
    def num_ranks(self) -> int:
        """Of both axes."""
        return self.communicator.size * self.context.size

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can record the collectives of both axes."""
        return self.communicator.capturable and self.context.capturable

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the first of all ranks, in place."""
        return self.communicator.broadcast(self.context.broadcast(tensor))
