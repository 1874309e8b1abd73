"""Self-attention from hidden states to hidden states: project, norm heads, rotate, attend, project back."""

from __future__ import annotations

import torch

from ...shardplan.config import Attention as AttentionConfig
from ..batch import ForwardBatch
from .attention import CachedAttention
from .builder import LayerBuilder
from .norm import RMSNorm
from .rotary import rotate


class SelfAttention:
    """Multi-head attention with grouped keys and values; `q_norm` and `k_norm` work on single heads before rotation."""

    def __init__(
        self,
        build: LayerBuilder,
        index: int,
        config: AttentionConfig,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        p = f"model.layers.{index}.self_attn."
        self.qkv = build.column(f"{p}q_proj", f"{p}k_proj", f"{p}v_proj")
        self.sizes = build.attention_sizes(config)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.config = config
        self.attend = CachedAttention(index, config)
        self.o_proj = build.row(f"{p}o_proj")

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in self.qkv(x).split(self.sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = batch.cos_sin(self.config.rope, x.dtype)
        interleaved = self.config.rope.interleaved
        q, k = rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
        return self.o_proj(self.attend(q, k, v, batch))
