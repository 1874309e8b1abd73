"""Whether a plan can be true: names, sizes and ranges fit together and describe the model that config.json describes.

A plan is data that the runtime builds on. One that was edited, damaged or mixed with other files is refused here, by
name, instead of failing somewhere in a forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .config import ModelConfig
from .dtypes import SAFETENSORS_NAME
from .errors import CheckpointError, MgtpError
from .families import model_tensors
from .layout import FINGERPRINT_LENGTH, lay_out
from .names import canonical_name
from .partition import model_axes
from .plan import HASH_ALGORITHM, PLAN_FILE, RankPlan, ShardPlan, rank_file_name
from .sources.base import TensorInfo
from .values import shown

_HASH = re.compile(r"[0-9a-f]{32}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def check_fields(plan: ShardPlan, where: str) -> None:
    """Check everything that needs no model. Raises CheckpointError starting with `where`."""
    n = plan.tp_size
    _require(n >= 1 and len(plan.ranks) == n, where, f"tp_size is {n}, but there are {len(plan.ranks)} ranks")
    _require(
        len(plan.shares) == n and all(0 < s < 1 << 31 for s in plan.shares), where, f"shares are {shown(plan.shares)}"
    )
    _require(plan.dtype in SAFETENSORS_NAME, where, f"dtype is {shown(plan.dtype)}")
    _require(plan.hash_algorithm == HASH_ALGORITHM, where, f"hash_algorithm is {shown(plan.hash_algorithm)}")
    print_fits = plan.fingerprint.isascii() and plan.fingerprint.isprintable()
    _require(
        print_fits and 0 < len(plan.fingerprint) <= FINGERPRINT_LENGTH,
        where,
        f"fingerprint is {shown(plan.fingerprint)}",
    )
    for name, file in plan.files.items():
        plain = _PLAIN_NAME.fullmatch(name) and name != PLAN_FILE and not name.endswith(".safetensors")
        _require(bool(plain), where, f"{shown(name)} is not the name of a small file")
        _require(file.bytes >= 0 and bool(_HASH.fullmatch(file.hash)), where, f"{name} has no proper size and hash")
    for i, rank in enumerate(plan.ranks):
        _require(rank.rank == i, where, f"ranks are not numbered from 0 to {n - 1}")
        _require(rank.file == rank_file_name(i, n), where, f"rank {i}'s file is {shown(rank.file)}")


def check_against_model(plan: ShardPlan, model: ModelConfig, where: str, ranks: Iterable[int]) -> None:
    """Check that axes and tensors are those of `model` (with the plan's ties), laid out by this version's rules.

    Tensors are compared for `ranks` only. Raises CheckpointError starting with `where`.
    """
    _require(plan.architecture == model.architecture, where, f"architecture is {shown(plan.architecture)}")
    _require(plan.family == model.family, where, f"family is {shown(plan.family)}")
    _check_axes(plan, model, where)
    specs, axes = tuple(model_tensors(model)), plan.shared_axes()
    first = [t for t in plan.ranks[0].tensors if t.source is not None]
    infos = {
        canonical_name(t.name): TensorInfo(t.name, t.source.dtype, tuple(t.source.shape)) for t in first if t.source
    }
    for spec in specs:
        _require(spec.name in infos, where, f"{spec.name} is missing")
        _require(infos[spec.name].shape == spec.shape, where, f"{spec.name} has another shape than config.json gives")
    for r in ranks:
        try:
            expected = lay_out(specs, infos, axes, r, plan.tp_size, SAFETENSORS_NAME[plan.dtype])
        except (ValueError, IndexError) as error:
            raise _damaged(where, f"rank {r}: {error}") from None
        _check_rank(plan.ranks[r], expected, where)


def _check_rank(rank: RankPlan, expected: RankPlan, where: str) -> None:
    from .hashing import hash_rank

    for tensor, wanted in zip(rank.tensors, expected.tensors, strict=False):
        _require(bool(_HASH.fullmatch(tensor.hash)), where, f"rank {rank.rank}: {shown(tensor.name)} has no hash")
        wanted.hash = tensor.hash
        _require(tensor == wanted, where, f"rank {rank.rank}: {shown(tensor.name)} is not where or what it should be")
    same = len(rank.tensors) == len(expected.tensors)
    _require(same, where, f"rank {rank.rank} has {len(rank.tensors)} tensors, not {len(expected.tensors)}")
    sizes = (rank.bytes, rank.data_offset) == (expected.bytes, expected.data_offset)
    _require(sizes, where, f"rank {rank.rank}: bytes or data_offset is wrong")
    _require(rank.hash == hash_rank(t.hash for t in rank.tensors), where, f"rank {rank.rank}: the hashes do not agree")


def _check_axes(plan: ShardPlan, model: ModelConfig, where: str) -> None:
    try:
        expected = model_axes(model, plan.shares)
    except MgtpError as error:
        raise _damaged(where, error.message) from None
    axes = plan.shared_axes()
    _require(axes.keys() == expected.keys(), where, f"axes are {shown(sorted(axes))}")
    for name, axis in axes.items():
        _require(axis.size == expected[name].size, where, f"axis {name} has size {axis.size}")
        same = axis == expected[name]
        _require(same, where, f"axis {name} is not shared out as shares {shown(plan.shares)} share it out")


def _require(holds: bool, where: str, fault: str) -> None:
    if not holds:
        raise _damaged(where, fault)


def _damaged(where: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{where}: damaged plan: {fault}", "shard the checkpoint again with mgtp shard")
