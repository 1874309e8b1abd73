"""Results on their way from the device to the host, so that the host can go on until it needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Landing:
    """Copies of `tensors` in host memory. On the CPU they are the tensors themselves."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if self._tensors and self._tensors[0].is_cuda:
            self._tensors = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> list[torch.Tensor]:
        """The tensors, once they have arrived: waits for what was launched before them, not after."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
