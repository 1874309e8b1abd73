"""Sums over ranks that are left to the norm after them, where one kernel does sum, residual add and norm.

A pre-norm layer sums what attention or the MLP found, adds it to the residual and norms the result. Where the
communicator has a kernel for the three together the projection leaves its sum out and the norm makes up for it. Of few
tokens the projection's own kernel can send its part to the other ranks: what is left to the norm is to receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ..communicator import Communicator
from ..parallel.linear import RowParallelLinear, SendsProducts
from .mlp import GatedMLP
from .norm import RMSNorm, Summing
from .self_attention import SelfAttention

if TYPE_CHECKING:
    from ..models.decoder import PreNormLayer


def leave_sums_to_norms(layers: Sequence[PreNormLayer], last_norm: RMSNorm, communicator: Communicator) -> int:
    """Connect projections with the norms that follow; how many. Each must be the last word before its norm."""
    if not hasattr(communicator, "all_reduce_add_rms_norm"):
        return 0
    count, sends = 0, hasattr(communicator, "send_product")
    next_norms = [*(layer.mixer_norm for layer in layers[1:]), last_norm]
    for layer, next_norm in zip(layers, next_norms, strict=True):
        for block, norm in ((layer.mixer, layer.mlp_norm), (layer.mlp, next_norm)):
            row = _last_projection(block)
            if row is None or row.bias is not None or row.scale != 1.0:
                continue
            row.leaves_sum, norm.sums = True, cast(Summing, communicator)
            # Between the last layer's mixer and its norm tokens are dropped: what is received must be what was sent.
            if sends and (layer is not layers[-1] or block is layer.mlp):
                row.sends_to = cast(SendsProducts, communicator)
            count += 1
    return count


def _last_projection(block: object) -> RowParallelLinear | None:
    """What a block ends with, when nothing happens to its output."""
    if isinstance(block, SelfAttention):
        return block.o_proj
    return block.down if isinstance(block, GatedMLP) else None
