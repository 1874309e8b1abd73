"""`mgtp bench`: latency and throughput of the engine, the physical limit first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..shardplan.errors import UsageError
from .app import app
from .launching import (
    BlockSizeOption,
    CollectiveOption,
    CpSizeOption,
    DeviceOption,
    DevicesOption,
    DtypeOption,
    DummyWeightsOption,
    EnforceEagerOption,
    JsonOption,
    KvCacheMemoryOption,
    ShardSetArgument,
    SharedDeviceOption,
    StepTimeoutOption,
    TpSizeOption,
)
from .options import positive

if TYPE_CHECKING:
    from ..runtime.launch.bench import BenchReport


@app.command("bench")
def bench(
    ctx: typer.Context,
    directory: ShardSetArgument,
    tp_size: TpSizeOption = None,
    cp_size: CpSizeOption = 1,
    dtype: DtypeOption = None,
    dummy_weights: DummyWeightsOption = False,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    allow_shared_device: SharedDeviceOption = False,
    collective: CollectiveOption = "auto",
    batches: Annotated[str, typer.Option(help="Sequences at once in decode steps.")] = "1,8,32,128",
    prefills: Annotated[
        str | None,
        typer.Option(
            help="Prompts at once x tokens of each; default: 1x512,32x512,1x8000, or what the context allows."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=0, help="Requests of the offline run; 0 leaves it out.")] = 512,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(callback=positive, help="Of each request, but for prefills; default: 512, or what fits."),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(callback=positive, help="Of each request, but for prefills; default: 128, or what fits."),
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(callback=positive, help="Tokens of one step at most.")] = 8192,
    max_num_seqs: Annotated[
        int | None, typer.Option(callback=positive, help="Sequences at once at most; default: the most that are asked.")
    ] = None,
    kv_cache_memory: KvCacheMemoryOption = None,
    block_size: BlockSizeOption = None,
    enforce_eager: EnforceEagerOption = False,
    step_timeout: StepTimeoutOption = None,
    collectives: Annotated[
        bool,
        typer.Option("--collectives", help="Also time the collectives of a decode step over tp ranks, on their own."),
    ] = False,
    cp_sizes: Annotated[
        str, typer.Option(help="Also start ranks with each of these cp sizes, such as 2,4, and time the prefills.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Measure decode steps, prefill and an offline run through the engine that serves, beside what the device allows.

    JSON: device, tp_size, cp_size, dtype, weight_bytes, ready_s, load_s, load_bytes_per_s, ceiling, decode, prefill,
    throughput, collectives (with --collectives: backend, batch, launches a step, ms, share of the step, null when fewer
    than 8 were timed, operations), first_token (with --cp-sizes: as prefill, and cp_size). load_bytes_per_s is null where
    nothing is brought over.
    """
    from ..runtime.launch.bench import Bench
    from ..runtime.launch.bench_options import check_at_once, fitting_options
    from ..runtime.launch.start import MAX_NUM_SEQS
    from .console import print_json
    from .launching import check_launch, launch_options, open_set, running

    sizes, shapes = _sizes(batches, "--batches"), None if prefills is None else _shapes(prefills)
    others = _sizes(cp_sizes, "--cp-sizes")
    shard_set = open_set(directory, tp_size, dtype, dummy=dummy_weights)
    if collectives and shard_set.plan.tp_size == 1:
        raise UsageError("--collectives times those of tp ranks, there is one", "use a shard set of several ranks")
    options = fitting_options(
        shard_set.model.max_position, sizes, shapes, requests, prompt_tokens, output_tokens, collectives
    )
    if others and not options.prefills:
        raise UsageError(f"--cp-sizes {cp_sizes!r} times prefills, there are none", "give some with --prefills")
    launch = launch_options(
        ctx,
        cp_size=cp_size,
        device=device,
        devices=devices,
        allow_shared_device=allow_shared_device,
        collective=collective,
        max_model_len=options.longest,
        max_num_seqs=max_num_seqs or min(options.most_at_once, MAX_NUM_SEQS),
        max_batch_tokens=max_batch_tokens,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        enforce_eager=enforce_eager,
        step_timeout=step_timeout,
    )
    check_at_once(options, launch)
    launches = [replace(launch, cp_size=size) for size in others]
    for each in launches:
        check_launch(shard_set, each)  # before anything is measured that would be lost
    with running(shard_set, launch) as started:
        report = Bench(started, shard_set, launch).run(options)
    for each in launches:
        with running(shard_set, each) as started:
            report.first_token += Bench(started, shard_set, each).first_tokens(options.prefills)
    print_json(report) if as_json else _print(report)


def _sizes(text: str, option: str) -> list[int]:
    """'1,8' as numbers; raises UsageError naming the part that is none."""
    parts = text.split(",") if text else []
    for part in parts:
        if not part.strip().isdecimal() or int(part) == 0:
            raise UsageError(f"{option} {text!r}: {part!r} is not a positive number", "give numbers such as 1,8,32")
    return [int(part) for part in parts]


def _shapes(text: str) -> list[tuple[int, int]]:
    """'1x512' as (1, 512)."""
    shapes = []
    for part in text.split(",") if text else []:
        numbers = [n.strip() for n in part.split("x")]
        if len(numbers) != 2 or not all(n.isdecimal() and int(n) for n in numbers):
            raise UsageError(f"--prefills {text!r}: {part!r} is not of the form 1x512", "give prompts x tokens")
        shapes.append((int(numbers[0]), int(numbers[1])))
    return shapes


def _print(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..runtime.launch.bench import FirstTokenFigure
    from ..runtime.launch.bench_work import metric
    from ..shardplan.values import counted

    console = Console(width=None if Console().is_terminal else 120)
    ceiling, load = report.ceiling, report.load_bytes_per_s
    print(
        f"{report.device}, tp {report.tp_size}, cp {report.cp_size}, {report.dtype}, "
        f"{metric(report.weight_bytes, 'B')} of weights"
    )
    print(f"ceiling: copy {metric(ceiling.copy_bytes_per_s, 'B/s')}, product {metric(ceiling.product_flops, 'FLOP/s')}")
    rate = "" if load is None else f", {metric(load, 'B/s')}"
    print(f"ready in {report.ready_s:.1f} s, of which loading {report.load_s:.2f} s{rate}")
    table = Table(box=None, pad_edge=False)
    for column in ("", "measured", "tokens/s", "work", "floor", "of the ceiling"):
        table.add_column(column, justify="right" if column else "left")
    for d in report.decode:
        work = f"{metric(d.bytes_per_step, 'B')} read"
        times = f"{d.step_ms:.3f} ms", f"{d.tokens_per_s:.0f}", work, f"{d.floor_ms:.3f} ms"
        table.add_row(f"decode step, batch {d.batch}", *times, f"{d.share_of_ceiling:.1%}")
    for p in (*report.prefill, *report.first_token):
        where = f", cp {p.cp_size}" if isinstance(p, FirstTokenFigure) else ""
        times = f"{p.seconds * 1e3:.1f} ms", f"{p.tokens_per_s:.0f}", metric(p.flops, "FLOP")
        floor = f"{p.floor_seconds * 1e3:.3f} ms", f"{p.share_of_ceiling:.1%}"
        table.add_row(f"prefill {p.requests} x {p.tokens}{where}", *times, *floor)
    if (t := report.throughput) is not None:
        name = f"{counted(t.requests, 'request')}, {t.prompt_tokens} in, {t.output_tokens} out"
        times = f"{t.seconds:.2f} s", f"{t.output_tokens_per_s:.0f}", "", f"{t.floor_seconds:.2f} s"
        table.add_row(name, *times, f"{t.share_of_ceiling:.1%}")
    console.print(table)
    for c in report.collectives:
        part = "too few steps to say of how much" if c.share is None else f"{c.share:.1%} of the step"
        what = f"{c.launches} launches, {c.ms:.3f} ms, {part}"
        print(f"collectives over {c.backend}, batch {c.batch}: {what}")
