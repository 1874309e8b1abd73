"""Makes the layers of one rank from its weights: the only place that knows names, axes and ranks at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...shardplan.config import Attention as AttentionConfig
from ...shardplan.config import ModelConfig
from ...shardplan.partition import Axis
from ..communicator import Communicator
from ..parallel.linear import (
    ColumnParallelLinear,
    ParallelLMHead,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ..parallel.norm import SplitRMSNorm
from ..weights import Weights
from .activation import GatedActivation
from .mlp import GatedMLP
from .moe import Experts, MixtureOfExperts, Pick, Router
from .norm import RMSNorm


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
        bias = self.weights.take_if_present(*(f"{name}.bias" for name in names))
        return ColumnParallelLinear(weight, bias, self.communicator)

    def replicated(self, name: str) -> ReplicatedLinear:
        """A projection that every rank has whole."""
        return ReplicatedLinear(self.weights.take(f"{name}.weight"), self.weights.take_if_present(f"{name}.bias"))

    def qkv(self, prefix: str, a: AttentionConfig) -> ColumnParallelLinear:
        """The input projections of one attention layer as one matrix, packed in the checkpoint or not."""
        packed = f"{prefix}qkv_proj"
        names = [packed] if f"{packed}.weight" in self.weights else [f"{prefix}{name}" for name in a.projections]
        return self.column(*names)

    def row(self, name: str) -> RowParallelLinear:
        """A projection back to the residual stream, summed over ranks and scaled as the model scales its branches."""
        weight, bias = self.weights.take(f"{name}.weight"), self.weights.take_if_present(f"{name}.bias")
        return RowParallelLinear(weight, bias, self.communicator, self.model.scales.residual)

    def norm(self, name: str, *, one_plus: bool = False, cast_first: bool = True, power: bool = False) -> RMSNorm:
        """An RMSNorm with the model's epsilon."""
        weight = self.weights.take(f"{name}.weight")
        return RMSNorm(weight, self.model.norm_eps, one_plus=one_plus, cast_first=cast_first, power=power)

    def full_width_norm(self, prefix: str, a: AttentionConfig) -> SplitRMSNorm:
        """The norm over all query heads, and over all key heads, of one layer: weights cut like the heads."""
        weights = self.weights.take(f"{prefix}q_norm.weight"), self.weights.take(f"{prefix}k_norm.weight")
        widths = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        held = self.axes[a.kv_axis].ranges
        is_first_holder = held.index(held[self.communicator.rank]) == self.communicator.rank
        return SplitRMSNorm(weights, widths, self.model.norm_eps, self.communicator, counts=(True, is_first_holder))

    def mlp(self, prefix: str) -> GatedMLP:
        """gate, up and down under `prefix`; gate and up may be packed in the checkpoint."""
        packed = f"{prefix}gate_up_proj"
        names = [packed] if f"{packed}.weight" in self.weights else [f"{prefix}gate_proj", f"{prefix}up_proj"]
        return GatedMLP(self.column(*names), self.row(f"{prefix}down_proj"), self.model.activation)

    def mixture(self, index: int, block: str, names: tuple[str, str, str], pick: Pick) -> MixtureOfExperts:
        """The experts of layer `index`: one by one in `block`, or stacked (see families.common.mixture)."""
        ffn, take = self.model.layers[index].ffn, self.weights.take
        p = f"model.layers.{index}.{'mlp' if self.model.stacked_experts else block}."
        if self.model.stacked_experts:
            gate_up, down = take(f"{p}experts.gate_up_proj"), take(f"{p}experts.down_proj")
        else:
            numbers, width = range(ffn.num_experts), self.size(ffn.axis)
            rows = take(*(f"{p}experts.{e}.{name}.weight" for e in numbers for name in names[:2]))
            gate_up = rows.view(ffn.num_experts, 2 * width, -1)
            down = take(*(f"{p}experts.{e}.{names[2]}.weight" for e in numbers)).view(ffn.num_experts, -1, width)
        experts = Experts(gate_up, down, GatedActivation(self.model.activation))
        return MixtureOfExperts(Router(take(f"{p}gate.weight"), None, pick), experts, self.communicator)

    def embedding(self) -> VocabParallelEmbedding:
        """The token embedding, scaled as the model scales it."""
        scales = self.model.scales
        return self.lookup("model.embed_tokens", "vocab", scales.embedding, round_scale=scales.round_embedding)

    def lookup(self, name: str, axis: str, scale: float = 1.0, *, round_scale: bool = False) -> VocabParallelEmbedding:
        """An embedding that is cut along `axis`; with `round_scale` its factor has the weights' dtype."""
        weight = self.weights.take(f"{name}.weight")
        if round_scale:
            scale = torch.tensor(scale, dtype=weight.dtype).item()
        return VocabParallelEmbedding(weight, self.axes[axis].ranges[self.communicator.rank], self.communicator, scale)

    def head(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        """The output head: its own weight, or the embedding's when they are tied."""
        weight = embedding.weight if self.model.tie_word_embeddings else self.weights.take("lm_head.weight")
        scales, ranges = self.model.scales, list(self.axes["vocab"].ranges)
        return ParallelLMHead(
            weight, ranges, self.communicator, divisor=scales.logit_divisor, softcap=scales.logit_softcap
        )

    def attention_sizes(self, a: AttentionConfig, *, gated: bool = False) -> list[int]:
        """Columns of q (with its gates, when `gated`), k and v in this rank's projection, as far as it has them."""
        q, kv = self.size(a.q_axis) * a.head_dim, self.size(a.kv_axis) * a.head_dim
        return [2 * q if gated else q, kv, kv][: len(a.projections)]
