"""`mgtp probe-memory`: what every rank really holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .app import app
from .launching import (
    CollectiveOption,
    CpSizeOption,
    DeviceOption,
    DevicesOption,
    DtypeOption,
    DummyWeightsOption,
    JsonOption,
    MaxModelLenOption,
    RevisionOption,
    ShardSetArgument,
    SharedDeviceOption,
    TpSizeOption,
    VerifyOption,
    launch_options,
    open_set,
    running,
)

if TYPE_CHECKING:
    from ..runtime.launch.probe import MemoryProbe


@app.command("probe-memory")
def probe_memory(
    ctx: typer.Context,
    directory: ShardSetArgument,
    tp_size: TpSizeOption = None,
    cp_size: CpSizeOption = 1,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    verify_on_load: VerifyOption = False,
    dummy_weights: DummyWeightsOption = False,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    allow_shared_device: SharedDeviceOption = False,
    collective: CollectiveOption = "auto",
    max_model_len: MaxModelLenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a shard set and report what every rank really holds, measured after a forward pass, beside the plan.

    Exits 1 when a rank is more than 5 % off its plan. For small models more is allowed, since loading takes memory whatever
    the size: 4 MiB on the CPU (the allocator's arenas), 64 MiB on a GPU (the allocator's pages of 20 MiB, the driver's
    modules).

    JSON: tp_size, cp_size, total_weight_bytes, within_plan, ranks (rank, device, file, file_bytes, planned_weight_bytes,
    weight_bytes, share, within_plan, allowance_bytes: by which it may be off, device_used_bytes, device_free_bytes,
    device_total_bytes, kv_cache_tokens: what all ranks of a cp group keep together, kv_cache_bytes: of this rank).
    """
    from ..runtime.launch.probe import probe
    from .console import print_json

    shard_set = open_set(directory, tp_size, dtype, revision, verify_on_load, dummy_weights)
    options = launch_options(
        ctx,
        cp_size=cp_size,
        device=device,
        devices=devices,
        allow_shared_device=allow_shared_device,
        collective=collective,
        max_model_len=max_model_len,
        max_num_seqs=1,
    )
    with running(shard_set, options) as started:
        report = probe(started, shard_set.plan)
    if as_json:
        print_json(report)
    else:
        _print_table(report)
    if not report.within_plan:
        from ..shardplan.errors import MgtpError

        off = next(r for r in report.ranks if not r.within_plan)
        raise MgtpError(
            f"rank {off.rank} holds {off.weight_bytes} bytes of weights, the plan says {off.planned_weight_bytes}",
            f"{abs(off.weight_bytes - off.planned_weight_bytes)} off, {off.allowance_bytes} are allowed: see what else it loads",
        )


def _print_table(report: MemoryProbe) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..runtime.launch.probe import TOLERANCE
    from ..shardplan.values import counted
    from .console import human_bytes

    table = Table(box=None, pad_edge=False)
    for column in ("rank", "device", "file", "planned", "measured", "share", "used", "free"):
        table.add_column(column, justify="left" if column in ("device", "file") else "right")
    for r in report.ranks:
        sizes = [human_bytes(x) for x in (r.planned_weight_bytes, r.weight_bytes)]
        device = [human_bytes(x) for x in (r.device_used_bytes, r.device_free_bytes)]
        table.add_row(str(r.rank), r.device, r.file, *sizes, f"{r.share:.1%}", *device)
    Console(width=None if Console().is_terminal else 120).print(table)
    total, tokens = human_bytes(report.total_weight_bytes), min(r.kv_cache_tokens for r in report.ranks)
    print(f"weights of {counted(len(report.ranks), 'rank')}: {total}; KV cache: {tokens} tokens")
    allowed = ", ".join(sorted({human_bytes(r.allowance_bytes) for r in report.ranks}))
    print(
        f"a rank may be {allowed} off its plan: {TOLERANCE:.0%} of it, or more where loading takes that whatever the size"
    )
