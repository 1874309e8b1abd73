"""What delta-net layers keep of a sequence instead of a KV cache: shapes and sizes, the same at any context length."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .config import DeltaNet, ModelConfig
from .partition import Axis

STATE_ITEMSIZE = 4
"""Bytes of a number of the recurrent state: float32, whatever the model's dtype."""


def conv_state_shape(net: DeltaNet, axes: Mapping[str, Axis], rank: int) -> tuple[int, int]:
    """[K - 1, channels]: the last inputs of `rank`'s convolution, in the model's dtype; channels are q, k and v heads."""
    k, v = _owned(axes, "delta_k_heads", rank), _owned(axes, "delta_v_heads", rank)
    return net.conv_kernel - 1, 2 * k * net.key_dim + v * net.value_dim


def recurrent_state_shape(net: DeltaNet, axes: Mapping[str, Axis], rank: int) -> tuple[int, int, int]:
    """[v heads, key dimension, value dimension] of `rank`, in float32."""
    return _owned(axes, "delta_v_heads", rank), net.key_dim, net.value_dim


def state_bytes(model: ModelConfig, axes: Mapping[str, Axis], rank: int, itemsize: int) -> int:
    """Bytes that all delta-net layers keep of one sequence on `rank`; `itemsize` is that of the model's dtype."""
    nets = [layer.delta_net for layer in model.layers if layer.delta_net is not None]
    return sum(
        math.prod(conv_state_shape(net, axes, rank)) * itemsize
        + math.prod(recurrent_state_shape(net, axes, rank)) * STATE_ITEMSIZE
        for net in nets
    )


def _owned(axes: Mapping[str, Axis], axis: str, rank: int) -> int:
    start, stop = axes[axis].ranges[rank]
    return stop - start
