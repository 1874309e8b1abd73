"""What a plan means for people: per rank its part of every axis and its bytes, how even that is, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .config import ModelConfig
from .dtypes import itemsize
from .errors import DeviceError, UsageError
from .fit import (
    Fit,
    StepSize,
    cache_needs,
    even_tp_sizes,
    fit,
    smallest_tp_size,
    workspace_bytes,
)
from .partition import model_axes
from .plan import AxisPlan, ShardPlan
from .share_search import best_shares
from .values import counted


class RankReport(msgspec.Struct):
    """One rank. `parts` counts its units of every axis; bytes of weights without padding; cache per sequence."""

    rank: int
    file: str
    file_bytes: int
    weight_bytes: int
    parts: dict[str, int]
    kv_bytes_per_token: int
    window_bytes_per_sequence: int
    state_bytes_per_sequence: int
    workspace_bytes: int


class RankFitReport(msgspec.Struct):
    """What one rank's device holds and has to set aside, what is left for the cache, and what that is enough for.

    The device's bytes are the sum of the others. Where not even those have room, `cache_bytes` is below zero.
    """

    rank: int
    device_bytes: int
    weight_bytes: int
    workspace_bytes: int
    context_bytes: int
    collective_bytes: int
    kept_back_bytes: int
    cache_bytes: int
    longest_context: int
    max_sequences: int

    @property
    def set_aside_bytes(self) -> int:
        """What neither weights, workspace nor cache can have."""
        return self.context_bytes + self.collective_bytes + self.kept_back_bytes


class FitReport(msgspec.Struct):
    """The answer to 'does it fit'. `smallest_tp_size` is there when it does not; shares when devices are unequal.

    `max_sequences` have `max_model_len` tokens: without such a length a model fits that can have any context, and they
    may be none.
    """

    fits: bool
    max_model_len: int
    longest_context: int
    max_sequences: int
    smallest_tp_size: int | None
    proposed_shares: list[int] | None
    proposed_longest_context: int | None
    ranks: list[RankFitReport]


class PlanReport(msgspec.Struct):
    """The JSON document of `mgtp plan`."""

    model: str
    is_shard_set: bool
    architecture: str
    tp_size: int
    cp_size: int
    dtype: str
    shares: list[int]
    fingerprint: str | None
    total_weight_bytes: int
    imbalance: float
    even_tp_sizes: list[int]
    axes: dict[str, AxisPlan]
    ties: dict[str, str]
    notes: list[str]
    ranks: list[RankReport]
    fit: FitReport | None = None


def report_plan(label: str, plan: ShardPlan, model: ModelConfig, *, is_shard_set: bool, cp_size: int = 1) -> PlanReport:
    """The report of a plan, without a fit. `model` has the plan's ties (see plan.effective_model).

    `ranks` are those of one tp group; there are `cp_size` of each.
    """
    axes, size = plan.shared_axes(), itemsize(plan.dtype)
    ranks = []
    for r in plan.ranks:
        cache = cache_needs(model, axes, r.rank, size, cp_size)
        ranks.append(
            RankReport(
                rank=r.rank,
                file=r.file,
                file_bytes=r.bytes,
                weight_bytes=r.weight_bytes,
                parts={name: axis.ranges[r.rank][1] - axis.ranges[r.rank][0] for name, axis in axes.items()},
                kv_bytes_per_token=cache.bytes_per_token,
                window_bytes_per_sequence=cache.window_bytes,
                state_bytes_per_sequence=cache.state,
                workspace_bytes=workspace_bytes(model, axes, r.rank, size, StepSize(cp_size=cp_size)),
            )
        )
    weights = [r.weight_bytes for r in ranks]
    return PlanReport(
        model=label,
        is_shard_set=is_shard_set,
        architecture=plan.architecture,
        tp_size=plan.tp_size,
        cp_size=cp_size,
        dtype=plan.dtype,
        shares=plan.shares,
        fingerprint=plan.fingerprint or None,
        total_weight_bytes=sum(weights),
        imbalance=max(weights) * len(weights) / sum(weights),
        even_tp_sizes=even_tp_sizes(model),
        axes=plan.axes,
        ties=plan.ties,
        notes=plan.notes,
        ranks=ranks,
    )


def report_fit(
    plan: ShardPlan, model: ModelConfig, device_bytes: Sequence[int], max_model_len: int | None, cp_size: int = 1
) -> FitReport:
    """Whether the plan fits on devices of that size: one for all ranks, or one a rank. Raises UsageError."""
    num_ranks = plan.tp_size * cp_size
    if len(device_bytes) not in (1, num_ranks):
        raise UsageError(
            f"--device-memory has {counted(len(device_bytes), 'size')}, there are {counted(num_ranks, 'rank')}",
            "give one size for all ranks, or one a rank",
        )
    if max_model_len is not None and max_model_len > model.max_position:
        raise UsageError(
            f"--max-model-len {max_model_len} is more than the model's {counted(model.max_position, 'position')}",
            f"use {model.max_position} or less",
        )
    every = list(device_bytes) * (num_ranks if len(device_bytes) == 1 else 1)
    # Ranks with the same part of the weights need the same: the smallest of their devices decides.
    devices = [min(every[r :: plan.tp_size]) for r in range(plan.tp_size)]
    size = itemsize(plan.dtype)
    weights = [r.bytes - r.data_offset for r in plan.ranks]
    found = fit(model, plan.shared_axes(), weights, size, devices, max_model_len, cp_size)
    shares, better = _proposal(model, plan, devices, max_model_len, found, cp_size)
    return FitReport(
        fits=found.fits,
        max_model_len=found.max_model_len,
        longest_context=found.longest_context,
        max_sequences=found.max_sequences,
        smallest_tp_size=None if found.fits else smallest_tp_size(model, size, min(devices), max_model_len, cp_size),
        proposed_shares=shares,
        proposed_longest_context=better.longest_context if better is not None else None,
        ranks=[
            RankFitReport(
                rank=r.rank,
                device_bytes=r.device_bytes,
                weight_bytes=r.weight_bytes,
                workspace_bytes=r.workspace_bytes,
                context_bytes=r.context_bytes,
                collective_bytes=r.collective_bytes,
                kept_back_bytes=r.kept_back_bytes,
                cache_bytes=r.cache_budget,
                longest_context=r.longest_context,
                max_sequences=r.max_sequences,
            )
            for r in found.ranks
        ],
    )


def check_fits(label: str, tp_size: int, dtype: str, report: FitReport) -> None:
    """Raise DeviceError, with the smallest tp size that would do, when the plan does not fit."""
    if report.fits:
        return
    tight = min(report.ranks, key=lambda r: (r.longest_context, r.max_sequences, r.cache_bytes))
    what = f"a sequence of {counted(report.max_model_len, 'token')}" if tight.longest_context else "any sequence"
    message = (
        f"{label} in {dtype} does not fit at tp size {tp_size}: of {tight.device_bytes} bytes rank {tight.rank} needs "
        f"{tight.weight_bytes} for weights, {tight.workspace_bytes} as workspace and {tight.set_aside_bytes} set aside, "
        f"so {max(0, tight.cache_bytes)} are left for its cache, too little for {what}"
    )
    hints = [f"--tp-size {report.smallest_tp_size}"] if report.smallest_tp_size is not None else []
    if report.proposed_shares is not None:
        hints.append(f"--shares {','.join(map(str, report.proposed_shares))}")
    if tight.longest_context:
        hints.append(f"--max-model-len {report.longest_context}")
    hint = "use " + " or ".join(hints) if hints else "no tp size makes it fit: use devices with more memory"
    raise DeviceError(message, hint)


def _proposal(
    model: ModelConfig, plan: ShardPlan, devices: list[int], max_model_len: int | None, found: Fit, cp_size: int
) -> tuple[list[int] | None, Fit | None]:
    """Shares for unequal devices and the fit they give; nothing where that does not fit, or is no better than `found`."""
    if len(set(devices)) == 1:
        return None, None
    shares, best = best_shares(model, itemsize(plan.dtype), devices, max_model_len, cp_size)
    better = (best.longest_context, best.max_sequences) > (found.longest_context, found.max_sequences)
    if not best.fits or not better or model_axes(model, shares) == plan.shared_axes():
        return None, None
    return shares, best
