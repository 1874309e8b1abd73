"""From an opened checkpoint to a plan: what every rank gets. Nothing is read but headers, nothing is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from .config import ModelConfig
from .dtypes import COMMON_NAME, ITEMSIZE, safetensors_name
from .errors import CheckpointError, UsageError
from .families import is_unused, model_tensors, parse_config
from .layout import lay_out
from .names import canonical_names, has_stacked_experts
from .partition import TensorSpec, model_axes, part_bytes
from .plan import FORMAT_VERSION, HASH_ALGORITHM, AxisPlan, ShardPlan, Tool
from .sources.base import Source, TensorInfo
from .values import counted, shown

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_LISTED = 1000  # names in one message
_SEARCHED = 1 << 18  # tensors of a model, more than any real one has


@dataclass(frozen=True)
class Blueprint:
    """A checkpoint matched against its family: the model, its tensors in order of use, and where each comes from."""

    model: ModelConfig
    specs: tuple[TensorSpec, ...]
    sources: Mapping[str, TensorInfo]
    ties: Mapping[str, str]
    notes: tuple[str, ...]


def match(source: Source) -> Blueprint:
    """Match every tensor of a checkpoint with what its config.json calls for, both ways.

    Raises CheckpointError listing every tensor that is missing, unexpected, or of another shape or type.
    """
    model = parse_config(source.config, f"{source.label}: config.json")
    names = {k: v for k, v in canonical_names(source.tensors).items() if not is_unused(model, k)}
    model = replace(model, stacked_experts=has_stacked_experts(names))
    notes = list(source.notes)
    ignored = len(source.tensors) - len(names)
    if ignored:
        notes.append(f"skipped {counted(ignored, 'tensor')} of no part in text generation")
    # A head beside tied embeddings is looked at last: its values only matter when every shape is right.
    stored = replace(model, tie_word_embeddings=model.tie_word_embeddings and HEAD not in names)
    # A config may call for billions of tensors: no more are made than are needed to say that they are missing.
    specs = tuple(islice(model_tensors(stored), len(names) + _LISTED))
    _check_names(specs, stored, names, source)
    sources = {spec.name: source.tensors[names[spec.name]] for spec in specs}
    _check_tensors(specs, sources, source)
    if model.tie_word_embeddings and HEAD in names:
        is_copy, note = _compare_head(source, names[HEAD], names[EMBEDDING])
        notes += note
        if is_copy:
            specs = tuple(spec for spec in specs if spec.name != HEAD)
        else:
            model = stored
    ties = {HEAD: EMBEDDING} if model.tie_word_embeddings else {}
    return Blueprint(model, specs, sources, ties, tuple(notes))


def make_plan(source: Source, tp_size: int, dtype: str = "auto", shares: Sequence[int] = ()) -> ShardPlan:
    """The plan for cutting `source` into `tp_size` ranks, before anything is read: hashes are still empty.

    `shares` are the ranks' weights (default: equal). Raises CheckpointError or UsageError.
    """
    blueprint = match(source)
    if tp_size > blueprint.model.vocab_size:  # before a list of that length is made
        raise UsageError(f"--tp-size {tp_size} is more than the model has of anything", "use fewer ranks")
    weights = list(shares) or [1] * tp_size
    if tp_size < 1 or len(weights) != tp_size or min(weights) < 1:
        raise UsageError(f"--tp-size {tp_size} needs as many positive shares, got {shown(weights)}", "use 1, 2, 4, ...")
    axes = model_axes(blueprint.model, weights)
    stored = safetensors_name(dtype if dtype != "auto" else auto_dtype(blueprint))
    _check_conversion(blueprint, stored, source)
    ranks = [lay_out(blueprint.specs, blueprint.sources, axes, r, tp_size, stored) for r in range(tp_size)]
    return ShardPlan(
        format_version=FORMAT_VERSION,
        tool=Tool(),
        architecture=blueprint.model.architecture,
        family=blueprint.model.family,
        tp_size=tp_size,
        shares=weights,
        dtype=COMMON_NAME[stored],
        fingerprint=source.fingerprint or "",
        hash_algorithm=HASH_ALGORITHM,
        axes={n: AxisPlan(a.size, a.unit, list(a.ranges), a.copied) for n, a in axes.items()},
        ties=dict(blueprint.ties),
        notes=list(blueprint.notes),
        files={},
        ranks=ranks,
    )


def auto_dtype(blueprint: Blueprint) -> str:
    """The dtype that most of the checkpoint's bytes have; for quantised values bfloat16, the usual one to run in."""
    size: Counter[str] = Counter()
    for info in blueprint.sources.values():
        dtype = "BF16" if info.is_quantised else info.dtype
        size[dtype] += part_bytes(info.shape, ITEMSIZE[dtype])
    return COMMON_NAME[size.most_common(1)[0][0]]


def _compare_head(source: Source, head: str, embedding: str) -> tuple[bool, list[str]]:
    """Whether a head stored beside tied embeddings is only a copy of them, and a note where there is a doubt."""
    if not source.has_weights:
        note = "the checkpoint stores a head beside tied embeddings: taken for a copy until the weights are read"
        return True, [note]
    if _same_tensor(source, head, embedding):
        return True, []
    return False, ["tie_word_embeddings is set, but the checkpoint has a different lm_head.weight: it is used"]


def _same_tensor(source: Source, head: str, embedding: str) -> bool:
    """Whether two matrices of one shape are equal bit for bit, read in bounded windows."""
    import numpy as np

    a, b = source.tensors[head], source.tensors[embedding]
    if a.dtype != b.dtype:
        return False
    step = max(1, (8 << 20) // part_bytes(a.shape[1:], ITEMSIZE[a.dtype]))
    for start in range(0, a.shape[0], step):
        stop = min(start + step, a.shape[0])
        left, right = source.rows(head, start, stop), source.rows(embedding, start, stop)
        if not np.array_equal(left.view("u1"), right.view("u1")):
            return False
    return True


def _check_conversion(blueprint: Blueprint, dtype: str, source: Source) -> None:
    """A shard set holds values that were rounded to its dtype: cutting it again cannot give those of another one."""
    for info in blueprint.sources.values():
        if info.origin and dtype != info.dtype:
            held, asked = COMMON_NAME[info.dtype], COMMON_NAME[dtype]
            raise UsageError(
                f"--dtype {asked}: {source.label} was converted from {info.origin} to {held}",
                f"use --dtype {held}, or shard the original checkpoint",
            )


def _check_names(specs: Sequence[TensorSpec], model: ModelConfig, names: Mapping[str, str], source: Source) -> None:
    missing = [spec.name for spec in specs if spec.name not in names]
    unexpected = _unexpected(model, names) if missing or len(specs) < len(names) else []
    if missing == [HEAD] and not unexpected:
        raise CheckpointError(
            f"{source.label}: {HEAD} is missing and tie_word_embeddings is false",
            "take the complete checkpoint, or set tie_word_embeddings in config.json if its head is the embedding",
        )
    found = []
    if missing:
        more = " or more" if len(missing) >= _LISTED else ""
        found.append(f"{counted(len(missing), 'missing tensor')}{more}: {_listed(missing)}")
    if unexpected:
        found.append(f"{counted(len(unexpected), 'tensor')} not part of this architecture: {_listed(unexpected)}")
    if found:
        way_out = "adapters have to be merged first" if unexpected else "download the checkpoint again"
        raise CheckpointError(
            f"{source.label}: {'; '.join(found)}", f"config.json and weights must belong together; {way_out}"
        )


def _unexpected(model: ModelConfig, names: Mapping[str, str]) -> list[str]:
    """What a checkpoint calls the tensors that the model does not have; nothing for a model of too many tensors."""
    left, specs = dict(names), model_tensors(model)
    for spec in islice(specs, _SEARCHED):
        left.pop(spec.name, None)
    return sorted(left.values()) if next(specs, None) is None else []


def _check_tensors(specs: Sequence[TensorSpec], sources: Mapping[str, TensorInfo], source: Source) -> None:
    for spec in specs:
        info = sources[spec.name]
        if info.dtype not in COMMON_NAME:
            raise CheckpointError(
                f"{source.label}: {info.name} has dtype {info.dtype}, not a plain float", "use the unquantised weights"
            )
        if info.shape != spec.shape:
            raise CheckpointError(
                f"{source.label}: {info.name} has shape {list(info.shape)}, config.json calls for {list(spec.shape)}",
                "config.json and weights must belong together",
            )


def _listed(names: Sequence[str]) -> str:
    """All names, on one line; of more than any real checkpoint can lack, the first ones."""
    return ", ".join([*names[:_LISTED], *(["..."] if len(names) > _LISTED else [])])
