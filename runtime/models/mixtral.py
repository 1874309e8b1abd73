"""Mixtral: Llama, with a mixture of experts in every layer."""

from __future__ import annotations

from functools import partial

from ..layers.builder import LayerBuilder
from ..layers.moe import MixtureOfExperts, softmax_then_top_k
from .decoder import Decoder
from .llama import LlamaLayer


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, partial(LlamaLayer, make_mlp=_experts), builder.norm("model.norm"))


def _experts(build: LayerBuilder, index: int) -> MixtureOfExperts:
    pick = partial(softmax_then_top_k, k=build.model.layers[index].ffn.experts_per_token, renormalize=True)
    return build.mixture(index, "block_sparse_moe", ("w1", "w3", "w2"), pick)
