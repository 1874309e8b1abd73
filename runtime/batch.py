"""One step's work as tensors: T tokens of S sequences, laid out one after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..shardplan.rope import Rope
    from .kv_cache import KVCache
    from .layers.rotary import RotaryTables
    from .state_cache import StateCache


@dataclass
class ForwardBatch:
    """Everything a forward pass needs besides the weights.

    `query_lens` and `kv_lens` are per sequence: new tokens, and tokens in the cache once they are written. `slots`
    and `tables` are per cache group: where each token's key and value go (a flat index of block * block_size +
    offset), and each sequence's blocks. `state_slots` are the sequences' rows in `states`. `logit_rows` are the tokens
    whose logits are wanted.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    rope_lengths: torch.Tensor  # [T] int64: the length that length-dependent frequencies go by
    query_lens: list[int]
    kv_lens: list[int]
    slots: list[torch.Tensor]  # a group: [T] int64
    tables: list[torch.Tensor]  # a group: [S, blocks] int64
    state_slots: torch.Tensor  # [S] int64
    logit_rows: torch.Tensor | slice  # [L] int64
    cache: KVCache
    states: StateCache
    rotary: RotaryTables
    scratch: dict = field(default_factory=dict)  # what layers share within one step, such as attention masks

    @property
    def decode_only(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return len(self.query_lens) == len(self.token_ids)

    def logit_rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [L, H]: the tokens whose logits are wanted."""
        return x[self.logit_rows]

    def cos_sin(self, rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, d/2] of this step's positions in `dtype`, worked out once a step."""
        key = (rope, dtype)
        if key not in self.scratch:
            cos, sin = self.rotary.rows(rope, self.positions, self.rope_lengths)
            self.scratch[key] = cos.to(dtype), sin.to(dtype)
        return self.scratch[key]


def upload(numbers: list[int], device: torch.device) -> torch.Tensor:
    """`numbers` as int32 on `device`, in one copy that nobody waits for."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int32)
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)
