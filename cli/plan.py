"""`mgtp plan`: what each rank gets, and whether it fits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from ..shardplan.errors import UsageError
from ..shardplan.values import escaped
from .app import app
from .launching import CpSizeOption, DummyWeightsOption, JsonOption, MaxModelLenOption, RevisionOption
from .options import positive
from .shard import ModelArgument, SharesOption

if TYPE_CHECKING:
    from ..shardplan.config import ModelConfig
    from ..shardplan.plan import ShardPlan
    from ..shardplan.plan_report import FitReport, PlanReport

log = logging.getLogger("mgtp.cli")


@app.command()
def plan(
    model: ModelArgument,
    tp_size: Annotated[
        int | None, typer.Option(callback=positive, help="The number of ranks; for a shard set, its own when left out.")
    ] = None,
    cp_size: CpSizeOption = 1,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's own), bfloat16, float16, float32, float64.")
    ] = "auto",
    shares: SharesOption = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Does it fit: one size for all ranks or one a rank, such as 24GiB,12GiB.")
    ] = None,
    max_model_len: MaxModelLenOption = None,
    revision: RevisionOption = None,
    dummy_weights: DummyWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what each rank would get, from headers alone: nothing is written, a hub model's weights are not downloaded.

    With --device-memory it answers whether that fits, and exits 4 when it does not; else GPUs that are found are taken.
    A device has to hold weights, the workspace of a step, what is set aside, and the cache. Set aside are the context of
    CUDA, what collectives take, and what is kept back: 8 % of what is free after loading, less the workspace.

    JSON: model, is_shard_set, architecture, tp_size, cp_size, dtype, shares, fingerprint (null until the weights were read),
    total_weight_bytes, imbalance (largest rank over mean), even_tp_sizes, axes (size, unit, ranges, copied), ties,
    notes, ranks (rank, file, file_bytes, weight_bytes, parts, kv_bytes_per_token, window_bytes_per_sequence,
    state_bytes_per_sequence, workspace_bytes), fit (null, or fits, max_model_len, longest_context, max_sequences: of
    max_model_len tokens, smallest_tp_size: null when this one fits or none does, proposed_shares,
    proposed_longest_context, ranks: rank, device_bytes, weight_bytes, workspace_bytes, context_bytes, collective_bytes,
    kept_back_bytes, cache_bytes: what is left, below zero when nothing is, longest_context, max_sequences).
    """
    from ..shardplan.fit import check_cp_size
    from ..shardplan.plan_report import check_fits, report_fit, report_plan
    from ..shardplan.quantities import parse_sizes
    from .console import print_json

    found, config, is_shard_set = _plan(model, tp_size, dtype, shares, revision, dummy_weights)
    check_cp_size(cp_size, config.max_position)
    report = report_plan(model, found, config, is_shard_set=is_shard_set, cp_size=cp_size)
    sizes = (
        parse_sizes(device_memory, "--device-memory")
        if device_memory is not None
        else _devices(found.tp_size * cp_size)
    )
    if sizes:
        report.fit = report_fit(found, config, sizes, max_model_len, cp_size)
    elif max_model_len is not None:
        raise UsageError("--max-model-len needs to know the memory", "add --device-memory, such as 24GiB")
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report.fit is not None and device_memory is not None:
        check_fits(model, report.tp_size, report.dtype, report.fit)


def _plan(
    model: str, tp_size: int | None, dtype: str, shares: str | None, revision: str | None, dummy: bool
) -> tuple[ShardPlan, ModelConfig, bool]:
    """The plan, the model it is for, and whether it is that of an existing shard set."""
    import os
    from pathlib import Path

    from ..shardplan.plan import PLAN_FILE, effective_model
    from ..shardplan.planner import make_plan, match
    from ..shardplan.quantities import parse_shares
    from ..shardplan.shard_set import ShardSet
    from ..shardplan.sources import open_source
    from ..shardplan.sources.config_only import open_config
    from ..shardplan.values import counted

    path = Path(os.path.expanduser(model))
    if not dummy and (path / PLAN_FILE).exists():
        shard_set = ShardSet.open(path)
        held = shard_set.plan
        if tp_size in (None, held.tp_size) and dtype in ("auto", held.dtype) and shares is None:
            return held, shard_set.model, True
        tp_size = tp_size or held.tp_size
        ranks = counted(held.tp_size, "rank")
        log.info("%s has %s in %s: this is what cutting it again would give", model, ranks, held.dtype)
    if tp_size is None:
        raise UsageError(f"{model} is not a shard set: --tp-size is missing", "say how many ranks: --tp-size N")
    weights = parse_shares(shares, tp_size) if shares is not None else []
    source = open_config(path, dtype) if dummy else open_source(model, revision=revision, headers_only=True)
    made = make_plan(source, tp_size, dtype, weights)
    return made, effective_model(match(source).model, made), False


def _devices(num_ranks: int) -> list[int]:
    """The memory of the GPUs that are found, when there are enough of them."""
    from ..runtime.launch.devices import DriverError, visible_gpus

    try:
        gpus = visible_gpus()
    except DriverError:
        return []
    return [gpu.total_bytes for gpu in gpus[:num_ranks]] if len(gpus) >= num_ranks else []


def _print(report: PlanReport) -> None:
    """A table of the ranks, then a line each for balance, ties and fit."""
    from rich.console import Console
    from rich.table import Table

    from .console import human_bytes

    table = Table(box=None, pad_edge=False)
    axes = list(report.axes)
    for column in ("rank", *(name.replace("_", " ") for name in axes), "weights", "KV/token"):
        table.add_column(column, justify="right")
    if report.fit is not None:
        for column in ("workspace", "set aside", "for the cache", "of device", "longest context"):
            table.add_column(column, justify="right")
    for r in report.ranks:
        cells = [str(r.parts[name]) for name in axes]
        row = [str(r.rank), *cells, human_bytes(r.weight_bytes), human_bytes(r.kv_bytes_per_token)]
        if report.fit is not None:
            f = report.fit.ranks[r.rank]
            sizes = (f.workspace_bytes, f.set_aside_bytes, max(0, f.cache_bytes), f.device_bytes)
            row += [*map(human_bytes, sizes), str(f.longest_context)]
        table.add_row(*row)
    Console(width=None if Console().is_terminal else 160, highlight=False).print(table)
    copied = [name.replace("_", " ") for name, axis in report.axes.items() if axis.copied]
    even = ", ".join(map(str, report.even_tp_sizes))
    if report.cp_size > 1:
        print(f"{report.tp_size * report.cp_size} ranks: {report.cp_size} of each, which share out the KV cache")
    print(f"{report.architecture}, {report.dtype}, {human_bytes(report.total_weight_bytes)} of weights in all")
    print(f"the largest rank has {report.imbalance:.3f} x the mean; even tp sizes: {even}")
    if copied:
        print(f"copied to several ranks: {', '.join(copied)}")
    for name, other in report.ties.items():
        print(f"tied: {name} is {other}")
    for note in report.notes:
        print(f"note: {escaped(note)}")
    _print_fit(report)


def _print_fit(report: PlanReport) -> None:
    from ..shardplan.fit import CACHE_FRACTION
    from .console import human_bytes

    fit = report.fit
    if fit is None:
        return
    context, collectives = fit.ranks[0].context_bytes, fit.ranks[0].collective_bytes
    shared = f", {human_bytes(collectives)} for collectives" if collectives else ""
    print(
        f"set aside on every device: {human_bytes(context)} for CUDA{shared}, and so much that with the workspace "
        f"{1 - CACHE_FRACTION:.0%} of what is free after loading stay free"
    )
    print(_verdict(fit))
    if fit.proposed_shares is not None:
        shares = ",".join(map(str, fit.proposed_shares))
        print(f"for these devices: --shares {shares}, for up to {fit.proposed_longest_context} tokens in one sequence")


def _verdict(fit: FitReport) -> str:
    """Whether it fits, in a line."""
    from ..shardplan.values import counted

    longest = fit.longest_context
    if not fit.fits:
        room = f"only for {longest} tokens in one sequence" if longest else "for no sequence at all"
        smallest = fit.smallest_tp_size
        way_out = "no tp size does" if smallest is None else f"the smallest tp size that does is {smallest}"
        return f"does not fit: there is room {room}; {way_out}"
    if fit.max_sequences:
        sequences = f"{counted(fit.max_sequences, 'sequence')} of {fit.max_model_len} tokens"
        return f"fits: up to {longest} tokens in one sequence, {sequences} at once"
    return f"fits: up to {longest} tokens in one sequence, less than the model's own {fit.max_model_len}"
