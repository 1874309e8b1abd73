"""Self-attention from hidden states to hidden states: project, norm heads, rotate, attend, project back."""

from __future__ import annotations

import torch

from ...shardplan.config import Attention as AttentionConfig
from ..batch import ForwardBatch
from .attention import CachedAttention
from .builder import LayerBuilder
from .norm import RMSNorm
from .rotary import rotate

Heads = torch.Tensor
"""[T, heads, D]"""


class SelfAttention:
    """Multi-head attention with grouped keys and values.

    `q_norm`, `k_norm` and `v_norm` work on single heads: before rotation, or those of q and k after it when
    `norm_after_rotation` is set. A layer that uses another one's keys and values projects queries only.
    """

    def __init__(
        self,
        build: LayerBuilder,
        index: int,
        config: AttentionConfig,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        v_norm: RMSNorm | None = None,
        norm_after_rotation: bool = False,
    ) -> None:
        p = f"model.layers.{index}.self_attn."
        self.qkv = build.qkv(p, config)
        self.sizes = build.attention_sizes(config)
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm
        self.norm_after_rotation = norm_after_rotation
        self.config = config
        self.attend = CachedAttention(index, config)
        self.o_proj = build.row(f"{p}o_proj")

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        q, *kv = (part.unflatten(-1, (-1, self.config.head_dim)) for part in self.qkv(x).split(self.sizes, dim=-1))
        q = self._placed(q, self.q_norm, batch)
        if not kv:
            return self.o_proj(self.attend(q, None, None, batch))
        k = self._placed(kv[0], self.k_norm, batch)
        # Without a value projection the values are the keys as projected.
        v = kv[-1] if self.v_norm is None else self.v_norm(kv[-1])
        return self.o_proj(self.attend(q, k, v, batch))

    def _placed(self, x: Heads, norm: RMSNorm | None, batch: ForwardBatch) -> Heads:
        """Queries or keys, normed and rotated to their positions."""
        if norm is None:
            return self._rotated(x, batch)
        return norm(self._rotated(x, batch)) if self.norm_after_rotation else self._rotated(norm(x), batch)

    def _rotated(self, x: Heads, batch: ForwardBatch) -> Heads:
        rope = self.config.rope
        dtype = torch.float32 if rope.in_float32 else x.dtype
        cos, sin = batch.cos_sin(rope, dtype)
        return rotate(x.to(dtype), cos, sin, rope.interleaved).to(x.dtype)
