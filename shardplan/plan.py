"""plan.json: the contract between the shard writer and the runtime. docs/plan-format.md describes every field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from .config import ModelConfig
from .errors import CheckpointError
from .names import has_stacked_experts
from .partition import Axis
from .version import __version__

FORMAT_VERSION = 1
PLAN_FILE = "plan.json"
HASH_ALGORITHM = "xxh3_128"


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """What wrote the plan."""

    name: str = "mgtp"
    version: str = __version__


class AxisPlan(msgspec.Struct, forbid_unknown_fields=True):
    """How a model axis of `size` is shared out: one half-open range a rank, in whole units of `unit`."""

    size: int
    unit: int
    ranges: list[tuple[int, int]]
    copied: bool


class SourceSlice(msgspec.Struct, forbid_unknown_fields=True):
    """Where a rank's tensor came from: the source's dtype and shape and, unless it is whole, the ranges along `dim`."""

    dtype: str
    shape: list[int]
    dim: int | None
    ranges: list[tuple[int, int]]


class TensorPlan(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor of a rank file: safetensors dtype, shape, byte offset in the data section, byte size, hash of its bytes.

    Padding has no source.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int
    bytes: int
    source: SourceSlice | None
    hash: str = ""


class RankPlan(msgspec.Struct, forbid_unknown_fields=True):
    """One rank's file: name, whole size, hash (of its tensors' hashes), and its tensors in file order."""

    rank: int
    file: str
    bytes: int
    data_offset: int
    tensors: list[TensorPlan]
    hash: str = ""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors, without padding and header."""
        return sum(t.bytes for t in self.tensors if t.source is not None)


class FilePlan(msgspec.Struct, forbid_unknown_fields=True):
    """A small file carried along."""

    bytes: int
    hash: str


class ShardPlan(msgspec.Struct, forbid_unknown_fields=True):
    """The whole plan. `fingerprint` is empty until the weights have been read once."""

    format_version: int
    tool: Tool
    architecture: str
    family: str
    tp_size: int
    shares: list[int]
    dtype: str
    fingerprint: str
    hash_algorithm: str
    axes: dict[str, AxisPlan]
    ties: dict[str, str]
    notes: list[str]
    files: dict[str, FilePlan]
    ranks: list[RankPlan]

    def shared_axes(self) -> dict[str, Axis]:
        """The axes in the form that the partition functions use."""
        return {n: Axis(a.size, a.unit, tuple(a.ranges), a.copied) for n, a in self.axes.items()}


def encode_plan(plan: ShardPlan) -> bytes:
    """plan.json's bytes: readable, and identical for identical plans."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def decode_plan(content: bytes, path: Path) -> ShardPlan:
    """The plan in `content`; raises CheckpointError naming `path` for anything that is not a plan of this format."""
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a plan: {error}", "shard the checkpoint again with mgtp shard") from None
    if head.format_version != FORMAT_VERSION:
        options = "".join(f" --{n} {v}" for n, v in (("tp-size", head.tp_size), ("dtype", head.dtype)) if v is not None)
        raise CheckpointError(
            f"{path}: format version {head.format_version}, this mgtp reads version {FORMAT_VERSION}",
            f"write the set again from its checkpoint: mgtp shard CHECKPOINT{options} --force --out {path.parent}",
        )
    try:
        return msgspec.json.decode(content, type=ShardPlan)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged plan: {error}", "shard the checkpoint again with mgtp shard") from None


class _Head(msgspec.Struct):
    """What plans of all versions say."""

    format_version: int
    tp_size: int | None = None
    dtype: str | None = None


def rank_file_name(rank: int, tp_size: int) -> str:
    """rank-0-of-4.safetensors"""
    return f"rank-{rank}-of-{tp_size}.safetensors"


def effective_model(model: ModelConfig, plan: ShardPlan) -> ModelConfig:
    """`model` as it is on disk: it may be flagged tied and still have a head of its own; experts may be stacked."""
    stacked = has_stacked_experts(t.name for t in plan.ranks[0].tensors)
    return replace(model, tie_word_embeddings=bool(plan.ties), stacked_experts=stacked)
