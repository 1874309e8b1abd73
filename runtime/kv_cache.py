"""Keys and values of past tokens on one rank, in blocks, so that sequences of any length share one memory.

Shapes: B blocks, S block size, kv heads of this rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..shardplan.config import ModelConfig
from ..shardplan.partition import Axis
from .cache_layout import cache_groups, kv_shape


class KVCache:
    """Per layer a key and a value tensor [B, S, kv, D]; block 0 of every group is a scratch block nobody owns."""

    def __init__(
        self,
        model: ModelConfig,
        axes: Mapping[str, Axis],
        rank: int,
        num_blocks: list[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = cache_groups(model)
        self.block_size, self.num_blocks = block_size, num_blocks
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        for g, group in enumerate(self.groups):
            for i in group.layers:
                shape = (num_blocks[g], block_size, *kv_shape(model, axes, rank, i))
                # Zeros, since masked-out slots are still multiplied by zero weights: NaN in there would spread.
                keys = torch.zeros(shape, dtype=dtype, device=device)
                self._layers[i] = keys, torch.zeros_like(keys), g
        for i, layer in enumerate(model.layers):
            if layer.attention is not None and layer.attention.kv_source is not None:
                self._layers[i] = self._layers[layer.attention.kv_source]

    @property
    def max_heads(self) -> int:
        """The most kv heads that any layer has on this rank."""
        return max((keys.shape[2] for keys, _, _ in self._layers.values()), default=1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, scratch blocks included."""
        return sum(self._layers[i][0].nbytes + self._layers[i][1].nbytes for group in self.groups for i in group.layers)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(keys, values, group) of one layer."""
        return self._layers[index]

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor, slots: list[torch.Tensor]) -> None:
        """Store new keys and values [T, kv, D] of layer `index` at its group's slots."""
        key_cache, value_cache, group = self._layers[index]
        key_cache.view(-1, *keys.shape[1:]).index_copy_(0, slots[group], keys)
        value_cache.view(-1, *values.shape[1:]).index_copy_(0, slots[group], values)
