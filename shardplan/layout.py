"""Where everything lies in a rank file. The file is the memory image: order of use, aligned for the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from .dtypes import ITEMSIZE
from .partition import Axis, TensorSpec, part_bytes, rank_shape, source_ranges
from .plan import RankPlan, SourceSlice, TensorPlan, rank_file_name
from .sources.base import TensorInfo

ALIGNMENT = 256
"""Bytes to which every fusion group's offset is rounded up: what CUDA allocations and vector loads expect."""

DATA_ALIGNMENT = 4096
"""Bytes to which the header is padded with spaces, so that the data section starts on a page."""


def lay_out(
    specs: Iterable[TensorSpec],
    sources: Mapping[str, TensorInfo],
    axes: Mapping[str, Axis],
    rank: int,
    tp_size: int,
    dtype: str,
) -> RankPlan:
    """Place `rank`'s part of every tensor. `sources` maps canonical names to what the checkpoint holds.

    The result's header depends on its fingerprint, which has a fixed length, so sizes are already final.
    """
    tensors: list[TensorPlan] = []
    offset, fuse, pads = 0, "", 0
    for spec in specs:
        gap = -offset % ALIGNMENT
        if gap and not (spec.fuse and spec.fuse == fuse):
            tensors.append(TensorPlan(f"_pad.{pads}", "U8", [gap], offset, gap, None))
            offset, pads = offset + gap, pads + 1
        fuse = spec.fuse
        shape, source = rank_shape(spec, axes, rank), sources[spec.name]
        ranges = source_ranges(spec.cut, axes, rank) if spec.cut else []
        cut = SourceSlice(source.origin or source.dtype, list(source.shape), spec.cut.dim if spec.cut else None, ranges)
        size = part_bytes(shape, ITEMSIZE[dtype])
        tensors.append(TensorPlan(source.name, dtype, list(shape), offset, size, cut))
        offset += size
    plan = RankPlan(rank, rank_file_name(rank, tp_size), 0, 0, tensors)
    plan.data_offset = len(header_bytes(plan, tp_size, ""))
    plan.bytes = plan.data_offset + offset
    return plan


FINGERPRINT_LENGTH = 45
"""Characters kept free for a fingerprint in a header: 'xxh3_128:' and 32 hex digits, or less."""


def header_bytes(plan: RankPlan, tp_size: int, fingerprint: str) -> bytes:
    """The safetensors header of a rank file: 8 length bytes, JSON, spaces up to DATA_ALIGNMENT."""
    metadata = {
        "format": "pt",
        "mgtp_fingerprint": fingerprint.ljust(FINGERPRINT_LENGTH),
        "mgtp_rank": str(plan.rank),
        "mgtp_tp_size": str(tp_size),
    }
    header: dict[str, object] = {"__metadata__": metadata}
    for t in plan.tensors:
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.offset, t.offset + t.bytes]}
    text = json.dumps(header, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - 8
    return size.to_bytes(8, "little") + text.ljust(size)
