"""Qwen3: Llama, with a norm on every query and key head."""

from __future__ import annotations

from functools import partial

from ..layers.builder import LayerBuilder
from .decoder import Decoder
from .llama import LlamaLayer


def build(builder: LayerBuilder) -> Decoder:
    """The model on one rank."""
    return Decoder(builder, partial(LlamaLayer, head_norms=True), builder.norm("model.norm"))
