"""What delta-net layers remember of each sequence on one rank: a fixed state in a slot, however long the sequence.

Shapes: N slots, K width of the convolution, C its channels on this rank, v value heads of this rank, dk and dv the
dimensions of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..shardplan.config import ModelConfig
from ..shardplan.partition import Axis
from ..shardplan.recurrent_state import conv_state_shape, recurrent_state_shape


class StateCache:
    """Per delta-net layer the last inputs of the convolution [N, K-1, C], and the state [N, v, dk, dv] in float32.

    The last slot is a scratch slot that no sequence owns.
    """

    def __init__(
        self,
        model: ModelConfig,
        axes: Mapping[str, Axis],
        rank: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for i, layer in enumerate(model.layers):
            if layer.delta_net is not None:
                conv_shape = num_slots, *conv_state_shape(layer.delta_net, axes, rank)
                state_shape = num_slots, *recurrent_state_shape(layer.delta_net, axes, rank)
                conv = torch.zeros(conv_shape, dtype=dtype, device=device)
                self._layers[i] = conv, torch.zeros(state_shape, dtype=torch.float32, device=device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(convolution inputs, state) of one layer, for all slots."""
        return self._layers[index]

    def clear(self, slots: Sequence[int]) -> None:
        """Forget whatever `slots` held: a sequence begins there."""
        if slots and self._layers:
            tensors = [tensor for pair in self._layers.values() for tensor in pair]
            index = torch.tensor(list(slots), dtype=torch.int64, device=tensors[0].device)
            for tensor in tensors:
                tensor.index_fill_(0, index, 0)
