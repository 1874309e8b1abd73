"""`mgtp probe`: devices, links, which collectives work and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import app
from .launching import (
    CollectiveOption,
    DeviceOption,
    DevicesOption,
    JsonOption,
    SharedDeviceOption,
)
from .options import path, positive

if TYPE_CHECKING:
    from ..runtime.launch.device_probe import ProbeResult


@app.command("probe")
def probe(
    ctx: typer.Context,
    tp_size: Annotated[
        int | None, typer.Option(callback=positive, help="Ranks that exchange; default: one a GPU, one on the CPU.")
    ] = None,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    allow_shared_device: SharedDeviceOption = False,
    collective: CollectiveOption = "auto",
    plot: Annotated[
        Path | None, typer.Option(parser=path, help="Draw latency over message size into this .svg or .png file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the devices and their links, test every backend of the collectives, and measure it from 1 KiB to 64 MiB.

    Exits 1 when data has arrived changed.

    JSON: torch_version, nccl_version, driver_version, devices (rank, device, total_bytes), links (source, target, kind,
    num_links, peer_access, written, bandwidth), collectives (backend, size, world, latency in seconds, bandwidth in
    bytes a second, verified), choice (backend, reason, cross_overs), faults (backend: why it cannot be used).
    """
    from ..runtime.launch.device_probe import num_ranks, probe_devices
    from .console import print_json
    from .latency_plot import latency_plot
    from .launching import launch_options, show_stages

    options = launch_options(
        ctx, device=device, devices=devices, allow_shared_device=allow_shared_device, collective=collective
    )
    ranks = num_ranks(tp_size, options)
    if plot is not None:
        _check_plot(plot, ranks)
    with show_stages(ranks) as on_stage:
        result = probe_devices(ranks, options, on_stage)
    print_json(result) if as_json else _print(result)
    if plot is not None:
        _write_plot(plot, latency_plot(result.collectives, plot.suffix))
    _check_data(result)


def _check_plot(plot: Path, ranks: int) -> None:
    """Refuse what cannot be drawn, or not there, before anything is measured."""
    from ..shardplan.errors import MgtpError, UsageError
    from .latency_plot import check_ending

    if ranks == 1:
        raise UsageError(f"--plot {plot}: one rank has no collectives to draw", "add --tp-size 2")
    try:
        check_ending(plot.suffix)
        was_there = plot.exists()
        plot.open("ab").close()
        if not was_there:
            plot.unlink()
    except MgtpError as error:
        raise UsageError(f"--plot {plot}: {error.message}", error.hint) from None
    except OSError as error:
        hint = "name a file that can be written, in a folder that exists"
        raise UsageError(f"--plot {plot}: {error.strerror}", hint) from None


def _write_plot(plot: Path, content: bytes) -> None:
    from ..shardplan.errors import MgtpError

    try:
        plot.write_bytes(content)
    except OSError as error:
        raise MgtpError(f"--plot {plot}: {error.strerror}", "make room, or name a file on another disk") from None


def _check_data(result: ProbeResult) -> None:
    """Raise MgtpError when what has arrived is not what was sent: answers of such ranks would be nonsense."""
    from ..shardplan.errors import MgtpError

    wrong = [f"the link {link.source} -> {link.target}" for link in result.links if not link.written]
    wrong += dict.fromkeys(
        f"{figure.backend} over {figure.world} ranks" for figure in result.collectives if not figure.verified
    )
    if wrong:
        raise MgtpError(
            f"data has arrived changed: {', '.join(wrong)}",
            "use --collective host or other --devices; dmesg may say why",
        )


def _print(result: ProbeResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from .console import human_bytes

    nccl, driver = result.nccl_version or "none", result.driver_version or "none"
    print(f"torch {result.torch_version}, NCCL {nccl}, driver {driver}")
    for d in result.devices:
        print(f"rank {d.rank}: {d.device}, {human_bytes(d.total_bytes)}")
    for link in result.links:
        lanes = f" x{link.num_links}" if link.num_links else ""
        access = "peer access" if link.peer_access else "no peer access"
        state = "written and read back" if link.written else "WRITTEN DATA DIFFERS"
        print(f"{link.source} -> {link.target}: {link.kind}{lanes}, {access}, {state}, {link.bandwidth / 1e9:.1f} GB/s")
    for backend, fault in result.faults.items():
        print(f"{backend} cannot be used: {fault}")
    if result.collectives:
        console, table = Console(width=None if Console().is_terminal else 120), Table(box=None, pad_edge=False)
        backends = list(dict.fromkeys(f.backend for f in result.collectives))
        for column in ("all-reduce", *(name for b in backends for name in (b, "GB/s"))):
            table.add_column(column, justify="right")
        for size in sorted({f.size for f in result.collectives}):
            cells = [human_bytes(size)]
            for f in (f for b in backends for f in result.collectives if f.backend == b and f.size == size):
                wrong = "" if f.verified else " WRONG"
                cells += [f"{f.latency * 1e6:.1f} us{wrong}", f"{f.bandwidth / 1e9:.2f}"]
            table.add_row(*cells)
        console.print(table)
    fastest = ", ".join(f"{c.backend} from {human_bytes(c.size)}" for c in result.choice.cross_overs)
    print(f"runs use {result.choice.backend}: {result.choice.reason}" + (f"; fastest: {fastest}" if fastest else ""))
