"""Self-attention from hidden states to hidden states: project, norm heads, rotate, attend, project back."""

from __future__ import annotations

from functools import cached_property

import torch

from ...shardplan.config import Attention as AttentionConfig
from ..batch import ForwardBatch
from ..paged import PagedBatch
from ..parallel.norm import SplitRMSNorm
from .attention import CachedAttention
from .builder import LayerBuilder
from .norm import RMSNorm
from .rotary import rotate

Heads = torch.Tensor
"""[T, heads, D]"""


class SelfAttention:
    """Multi-head attention with grouped keys and values.

    `q_norm`, `k_norm` and `v_norm` work on single heads: before rotation, or those of q and k after it when
    `norm_after_rotation` is set. `full_norm` works on all heads at once, before rotation. A layer that uses another
    one's keys and values projects queries only. With `gated`, each query head's projection holds the query and then as
    many gates, whose sigmoid scales what the head returns. `sinks` [q] are further logits in each head's softmax, which
    are dropped after it.
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
        full_norm: SplitRMSNorm | None = None,
        gated: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> None:
        p = f"model.layers.{index}.self_attn."
        self.qkv = build.qkv(p, config)
        self.sizes = build.attention_sizes(config, gated=gated)
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm
        self.norm_after_rotation, self.full_norm, self.gated = norm_after_rotation, full_norm, gated
        self.config = config
        self.attend = CachedAttention(index, config, sinks)
        self.o_proj = build.row(f"{p}o_proj")

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        if isinstance(batch, PagedBatch) and self.is_plain:
            return self.o_proj(self.attend.paged.from_projection(self.qkv(x), self.q_norm, self.k_norm, batch))
        q, *kv = (part.unflatten(-1, (-1, self.config.head_dim)) for part in self.qkv(x).split(self.sizes, dim=-1))
        q, gate = (q[:, 0::2], q[:, 1::2]) if self.gated else (q, None)
        if self.full_norm is not None:
            q_normed, k_normed = self.full_norm(q.flatten(1), kv[0].flatten(1))
            q, kv[0] = q_normed.view_as(q), k_normed.view_as(kv[0])
        q = self._placed(q, self.q_norm, batch)
        k, v = self._keys_and_values(kv, batch) if kv else (None, None)
        out = self.attend(q, k, v, batch)
        return self.o_proj(out if gate is None else out * torch.sigmoid(gate.flatten(1)))

    @cached_property
    def is_plain(self) -> bool:
        """Whether all that happens between projection and attention is norms of heads of one kind, and rotation."""
        norms = [n for n in (self.q_norm, self.k_norm) if n is not None]
        alike = len({(n.one_plus, n.cast_first, n.weight is None) for n in norms}) <= 1 and len(norms) != 1
        special = self.gated or self.norm_after_rotation or self.full_norm or self.v_norm
        return alike and all(n.weight is not None for n in norms) and not special and len(self.sizes) == 3

    def _keys_and_values(self, kv: list[Heads], batch: ForwardBatch) -> tuple[Heads, Heads]:
        """Keys and values to be cached; without a value projection the values are the keys as projected."""
        v = kv[-1] if self.v_norm is None else self.v_norm(kv[-1])
        return self._placed(kv[0], self.k_norm, batch), v

    def _placed(self, x: Heads, norm: RMSNorm | None, batch: ForwardBatch) -> Heads:
        """Queries or keys, normed and rotated to their positions."""
        if norm is None:
            return self._rotated(x, batch)
        return norm(self._rotated(x, batch)) if self.norm_after_rotation else self._rotated(norm(x), batch)

    def _rotated(self, x: Heads, batch: ForwardBatch) -> Heads:
        rope = self.config.rope
        cos, sin = batch.cos_sin(rope, torch.float32 if rope.in_float32 or rope.float32_tables else x.dtype)
        return rotate(x.float() if rope.in_float32 else x, cos, sin, rope.interleaved).to(x.dtype)
