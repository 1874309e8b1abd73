"""`mgtp shard`: one file per rank, and the plan."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import app
from .launching import JsonOption, RevisionOption
from .options import path, positive

if TYPE_CHECKING:
    from ..shardplan.plan import ShardPlan

log = logging.getLogger("mgtp.cli")

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or hub id, a .gguf file, or another shard set.")
]
ShardDtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto (the checkpoint's own), bfloat16, float16, float32 or float64.")
]
SharesOption = Annotated[
    str | None, typer.Option(help="Share everything out in proportion, such as 2,1,1; default: equally.")
]


@app.command()
def shard(
    model: ModelArgument,
    tp_size: Annotated[int, typer.Option(callback=positive, help="The number of ranks.")],
    out: Annotated[
        Path | None,
        typer.Option(parser=path, help="The folder to write; default: <model>-tp<N> in the current folder."),
    ] = None,
    dtype: ShardDtypeOption = "auto",
    revision: RevisionOption = None,
    shares: SharesOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a shard set that is not this one.")] = False,
    threads: Annotated[
        int | None, typer.Option(callback=positive, help="Threads that do the work; default: one a core, at most 8.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Cut a checkpoint into one file per rank, and write plan.json. Prints the folder.

    An interrupted run is continued by the same command; after a complete one it finds that nothing is to be done (the
    checkpoint is hashed again for that). JSON: out, written (false then), tp_size, dtype, fingerprint, total_bytes (of
    all files), ranks (rank, file, bytes), notes, seconds.
    """
    from ..shardplan.complete import complete_plan
    from ..shardplan.planner import make_plan
    from ..shardplan.quantities import parse_shares
    from ..shardplan.sources import open_source
    from ..shardplan.writer import default_folder, write_shards
    from .console import human_bytes, print_json
    from .progress import bytes_progress

    begin = time.monotonic()
    weights = parse_shares(shares, tp_size) if shares is not None else []
    source = open_source(model, revision=revision)
    plan = make_plan(source, tp_size, dtype, weights)
    for note in plan.notes:
        log.warning("%s: %s", model, note)
    if out is None:
        out = default_folder(model, tp_size)
    with bytes_progress("comparing") as progress:
        complete = None if force else complete_plan(source, plan, out, progress, threads)
    if complete is None:
        with bytes_progress("sharding") as progress:
            plan = write_shards(source, plan, out, force=force, progress=progress, threads=threads)
    seconds = time.monotonic() - begin
    if complete is None:
        log.info("wrote %s in %.1f s", human_bytes(sum(rank.bytes for rank in plan.ranks)), seconds)
    else:
        log.info("%s is complete already, from the same checkpoint, options and version: nothing was written", out)
    if as_json:
        print_json(_document(complete or plan, out, complete is None, seconds))
    else:
        print(out)


def _document(plan: ShardPlan, out: Path, written: bool, seconds: float) -> dict[str, object]:
    return {
        "out": str(out),
        "written": written,
        "tp_size": plan.tp_size,
        "dtype": plan.dtype,
        "fingerprint": plan.fingerprint,
        "total_bytes": sum(r.bytes for r in plan.ranks) + sum(f.bytes for f in plan.files.values()),
        "ranks": [{"rank": r.rank, "file": r.file, "bytes": r.bytes} for r in plan.ranks],
        "notes": plan.notes,
        "seconds": seconds,
    }
