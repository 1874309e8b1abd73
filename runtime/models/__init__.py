"""The forward pass of every family: a module each, of the same name as in shardplan/families, with `build(builder)`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from ..batch import ForwardBatch
from ..layers.builder import LayerBuilder

Model = Callable[[ForwardBatch], torch.Tensor]
"""Maps a batch to the logits [L, V] of its logit rows."""


def build_model(builder: LayerBuilder) -> Model:
    """The model of `builder`'s family. Raises when the rank file holds a tensor that the model has no use for."""
    model = import_module(f"{__name__}.{builder.model.family}").build(builder)
    builder.weights.check_all_used()
    return model
