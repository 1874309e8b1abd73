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
    from ..runtime.launch.bench import BenchOptions, BenchReport


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
    prefills: Annotated[str, typer.Option(help="Prompts at once x tokens of each.")] = "1x512,32x512,1x8000",
    requests: Annotated[int, typer.Option(min=0, help="Requests of the offline run; 0 leaves it out.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(callback=positive, help="Of each request, but for prefills.")] = 512,
    output_tokens: Annotated[int, typer.Option(callback=positive, help="Of each request, but for prefills.")] = 128,
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
    than 8 were timed, operations), first_token (with --cp-sizes: cp_size, requests, tokens, seconds).
    """
    from ..runtime.launch.bench import Bench, BenchOptions
    from .console import print_json
    from .launching import check_launch, launch_options, open_set, running

    shapes, numbers, others = _shapes(prefills), _sizes(batches, "--batches"), _sizes(cp_sizes, "--cp-sizes")
    if others and not shapes:
        raise UsageError(f"--cp-sizes {cp_sizes!r} times prefills, there are none", "give some with --prefills")
    options = BenchOptions(numbers, shapes, requests, prompt_tokens, output_tokens, collectives)
    shard_set = open_set(directory, tp_size, dtype, dummy=dummy_weights)
    if collectives and shard_set.plan.tp_size == 1:
        raise UsageError("--collectives times those of tp ranks, there is one", "use a shard set of several ranks")
    _check_lengths(options, shard_set.model.max_position)
    longest = max([prompt_tokens + output_tokens, *(tokens + 1 for _, tokens in options.prefills)])
    launch = launch_options(
        ctx,
        cp_size=cp_size,
        device=device,
        devices=devices,
        allow_shared_device=allow_shared_device,
        collective=collective,
        max_model_len=longest,
        max_num_seqs=max_num_seqs or max([requests, *options.batches, *(n for n, _ in options.prefills)]),
        max_batch_tokens=max_batch_tokens,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        enforce_eager=enforce_eager,
        step_timeout=step_timeout,
    )
    for size in others:  # before the first ones are measured
        check_launch(shard_set, replace(launch, cp_size=size))
    with running(shard_set, launch) as started:
        report = Bench(started, shard_set).run(options)
    for size in others:
        with running(shard_set, replace(launch, cp_size=size)) as started:
            report.first_token += Bench(started, shard_set).first_tokens(options.prefills)
    print_json(report) if as_json else _print(report)


def _check_lengths(options: BenchOptions, longest: int) -> None:
    """Raise UsageError for requests of more tokens than the model has positions."""
    asked = {f"--prefills {n}x{tokens} and a token of answer": tokens + 1 for n, tokens in options.prefills}
    prompt, output = options.prompt_tokens, options.output_tokens
    asked[f"--prompt-tokens {prompt} and --output-tokens {output}"] = prompt + output
    for what, length in asked.items():
        if length > longest:
            raise UsageError(f"{what} are {length}, the model takes {longest}", "ask for fewer tokens")


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
        numbers = _sizes(part.replace("x", ","), "--prefills")
        if len(numbers) != 2:
            raise UsageError(f"--prefills {text!r}: {part!r} is not of the form 1x512", "give prompts x tokens")
        shapes.append((numbers[0], numbers[1]))
    return shapes


def _print(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 120)
    ceiling = report.ceiling
    print(
        f"{report.device}, tp {report.tp_size}, cp {report.cp_size}, {report.dtype}, "
        f"{report.weight_bytes / 1e9:.2f} GB of weights"
    )
    print(
        f"ceiling: copy {ceiling.copy_bytes_per_s / 1e12:.3f} TB/s, product {ceiling.product_flops / 1e12:.1f} TFLOP/s"
    )
    print(f"ready in {report.ready_s:.1f} s, of which loading {report.load_s:.2f} s")
    table = Table(box=None, pad_edge=False)
    for column in ("", "measured", "tokens/s", "floor", "of the ceiling"):
        table.add_column(column, justify="right" if column else "left")
    for d in report.decode:
        step, floor = f"{d.step_ms:.3f} ms", f"{d.floor_ms:.3f} ms"
        table.add_row(
            f"decode step, batch {d.batch}", step, f"{d.tokens_per_s:.0f}", floor, f"{d.share_of_ceiling:.0%}"
        )
    for p in report.prefill:
        name, floor = f"prefill {p.requests} x {p.tokens}", f"{p.floor_seconds * 1e3:.1f} ms"
        table.add_row(name, f"{p.seconds * 1e3:.1f} ms", f"{p.tokens_per_s:.0f}", floor, f"{p.share_of_ceiling:.0%}")
    for f in report.first_token:
        name, rate = f"prefill {f.requests} x {f.tokens}, cp {f.cp_size}", f"{f.requests * f.tokens / f.seconds:.0f}"
        table.add_row(name, f"{f.seconds * 1e3:.1f} ms", rate, "", "")
    if report.throughput is not None:
        t = report.throughput
        name = f"{t.requests} requests, {t.prompt_tokens} in, {t.output_tokens} out"
        table.add_row(name, f"{t.seconds:.2f} s", f"{t.output_tokens_per_s:.0f}", "", "")
    console.print(table)
    for c in report.collectives:
        part = "too few steps to say of how much" if c.share is None else f"{c.share:.0%} of the step"
        what = f"{c.launches} launches, {c.ms:.3f} ms, {part}"
        print(f"collectives over {c.backend}, batch {c.batch}: {what}")
