"""A model without a checkpoint, to measure and to try out: planned from config.json alone, with random weights.

A weight depends on its tensor's name and its place in the whole tensor, nothing else. So the model is the same for any
number of ranks and on any device; and in any dtype, its weights being few bits wide.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..shardplan.dtypes import COMMON_NAME
from ..shardplan.plan import RankPlan, SourceSlice, effective_model
from ..shardplan.planner import make_plan, match
from ..shardplan.shard_set import ShardSet
from ..shardplan.sources.config_only import open_config

if TYPE_CHECKING:
    import torch

STEP = 2.0**-13
"""Weights are odd multiples of it, up to 255 of them: zero on average, with a standard deviation of 0.018. That is what
models are initialised with, so that activations keep their size."""

AT_ONCE = 1 << 26
"""Weights that are worked out at a time."""


def dummy_shard_set(path: Path, tp_size: int, dtype: str = "auto") -> ShardSet:
    """The set that sharding would give for the model of a config.json, or of the folder it is in; no file is written."""
    source = open_config(path, dtype)
    plan = make_plan(source, tp_size, dtype)
    model = effective_model(match(source).model, plan)
    return ShardSet(path, plan, source.config, model, {}, has_weights=False)


def random_block(plan: RankPlan, device: torch.device) -> torch.Tensor:
    """What a rank's data section could hold: random weights, ones where there is one dimension."""
    import torch

    from .weights import TORCH_DTYPE

    block = torch.zeros(plan.bytes - plan.data_offset, dtype=torch.uint8, device=device)
    for tensor in plan.tensors:
        if tensor.source is not None:
            values = block[tensor.offset : tensor.offset + tensor.bytes].view(TORCH_DTYPE[COMMON_NAME[tensor.dtype]])
            _fill(values.view(tuple(tensor.shape)), tensor.name, tensor.source)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was needed on the way is not the weights'
    return block


def random_tensor(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A whole tensor of such a model."""
    import torch

    values = torch.empty(tuple(shape), dtype=dtype, device=device)
    _fill(values, name, SourceSlice("", list(shape), None, []))
    return values


def _fill(values: torch.Tensor, name: str, source: SourceSlice) -> None:
    """Set a rank's part of a tensor. All of its dimensions but the last are seen as one."""
    if values.dim() == 1:
        values.fill_(1.0)
        return
    *outer, columns = (_places(source, dim, values.device) for dim in range(len(source.shape)))
    rows = outer[0]
    for size, places in zip(source.shape[1:], outer[1:], strict=False):
        rows = (rows.unsqueeze(1) * size + places).flatten()
    row_keys = _hash(rows * 0x01000193 + (zlib.crc32(name.encode()) - (1 << 31)))
    column_keys = _hash(columns)
    at_once = max(1, AT_ONCE // max(1, len(columns)))
    for part, keys in zip(values.flatten(0, -2).split(at_once), row_keys.split(at_once), strict=True):
        bits = _hash(keys.unsqueeze(1) + column_keys)
        # The highest 8 bits, -128 .. 127, as an odd number.
        part.copy_(bits.bitwise_right_shift_(24).mul_(2).add_(1)).mul_(STEP)


def _places(source: SourceSlice, dim: int, device: torch.device) -> torch.Tensor:
    """Where in the whole tensor this rank's part is, along one dimension: int32, as everything here."""
    import torch

    ranges = source.ranges if dim == source.dim else [(0, source.shape[dim])]
    return torch.cat([torch.arange(start, stop, dtype=torch.int32, device=device) for start, stop in ranges])


def _hash(x: torch.Tensor) -> torch.Tensor:
    """`x`, int32, mixed in place so that neighbours have nothing in common (after C. Wellons' lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1))  # without the sign
        x.mul_(factor)
    return x
