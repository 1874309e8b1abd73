"""Qwen3 with a mixture of experts: Qwen3, with experts in place of most MLPs."""

from __future__ import annotations

from functools import partial

from ...shardplan.config import ConfigReader
from ..layers.builder import LayerBuilder
from ..layers.moe import softmax_then_top_k
from .decoder import Decoder, FeedForward
from .llama import LlamaLayer, dense_mlp


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, partial(LlamaLayer, head_norms=True, make_mlp=_mlp), builder.norm("model.norm"))


def _mlp(build: LayerBuilder, index: int) -> FeedForward:
    """Experts, or an MLP in the layers that the config excepts."""
    ffn = build.model.layers[index].ffn
    if not ffn.num_experts:
        return dense_mlp(build, index)
    renormalize = ConfigReader(build.model.text).flag("norm_topk_prob", False)
    pick = partial(softmax_then_top_k, k=ffn.experts_per_token, renormalize=renormalize)
    return build.mixture(index, "mlp", ("gate_proj", "up_proj", "down_proj"), pick)
