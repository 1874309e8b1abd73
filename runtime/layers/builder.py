"""Makes the layers of one rank from its weights: the only place that knows names, axes and ranks at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...shardplan.config import Attention as AttentionConfig
from ...shardplan.config import ModelConfig
from ...shardplan.partition import Axis
from ..communicator import Communicator
from ..weights import Weights
from .linear import ColumnParallelLinear, ParallelLMHead, RowParallelLinear, VocabParallelEmbedding
from .mlp import GatedMLP
from .norm import FullWidthNorm, RMSNorm


@dataclass(frozen=True)
class LayerBuilder:
    """Layers of `model` for one rank. Names are canonical; a bias is used when the file has one."""

    model: ModelConfig
    axes: Mapping[str, Axis]
    weights: Weights
    communicator: Communicator

    def size(self, axis: str) -> int:
        """Units of a model axis that this rank owns."""
        start, stop = self.axes[axis].ranges[self.communicator.rank]
        return stop - start

    def column(self, *names: str) -> ColumnParallelLinear:
        """One matrix out of neighbouring projections, such as q, k and v."""
        weight = self.weights.take(*(f"{name}.weight" for name in names))
        return ColumnParallelLinear(weight, self.weights.take_if_present(*(f"{name}.bias" for name in names)))

    def row(self, name: str) -> RowParallelLinear:
        """A projection back to the hidden size, summed over ranks."""
        bias = self.weights.take_if_present(f"{name}.bias")
        return RowParallelLinear(self.weights.take(f"{name}.weight"), bias, self.communicator)

    def norm(self, name: str, *, one_plus: bool = False, cast_first: bool = True) -> RMSNorm:
        """An RMSNorm with the model's epsilon."""
        weight = self.weights.take(f"{name}.weight")
        return RMSNorm(weight, self.model.norm_eps, one_plus=one_plus, cast_first=cast_first)

    def full_width_norm(self, prefix: str, a: AttentionConfig) -> FullWidthNorm:
        """The norm over all query heads, and over all key heads, of one layer: weights cut like the heads."""
        weights = self.weights.take(f"{prefix}q_norm.weight"), self.weights.take(f"{prefix}k_norm.weight")
        sizes = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        held = self.axes[a.kv_axis].ranges
        is_first_holder = held.index(held[self.communicator.rank]) == self.communicator.rank
        return FullWidthNorm(weights, sizes, self.model.norm_eps, is_first_holder, self.communicator)

    def mlp(self, prefix: str) -> GatedMLP:
        """gate, up and down under `prefix`."""
        gate_up = self.column(f"{prefix}gate_proj", f"{prefix}up_proj")
        return GatedMLP(gate_up, self.row(f"{prefix}down_proj"), self.model.activation)

    def embedding(self) -> VocabParallelEmbedding:
        """The token embedding."""
        rows = self.axes["vocab"].ranges[self.communicator.rank]
        return VocabParallelEmbedding(self.weights.take("model.embed_tokens.weight"), rows, self.communicator)

    def head(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        """The output head: its own weight, or the embedding's when they are tied."""
        weight = embedding.weight if self.model.tie_word_embeddings else self.weights.take("lm_head.weight")
        return ParallelLMHead(weight, list(self.axes["vocab"].ranges), self.communicator)

    def attention_sizes(self, a: AttentionConfig, *, gated: bool = False) -> list[int]:
        """Columns of q (with its gates, when `gated`), k and v in this rank's fused projection."""
        q, kv = self.size(a.q_axis) * a.head_dim, self.size(a.kv_axis) * a.head_dim
        return [2 * q if gated else q, kv, kv]
