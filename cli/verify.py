"""`mgtp verify`: whether a shard set is what it was when it was written."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from ..shardplan.errors import CheckpointError
from .app import app
from .launching import JsonOption

log = logging.getLogger("mgtp.cli")


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by mgtp shard.")],
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also compare every tensor with this checkpoint, bit for bit.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="With --against: branch, tag or commit on the hub.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every tensor of a shard set again and compare it with the plan. Exits 3 when something is damaged.

    JSON: ok, tp_size, fingerprint, bytes (hashed), against (or null), faults (file, tensor, reason), seconds.
    """
    from ..shardplan.shard_set import ShardSet
    from ..shardplan.sources import open_source
    from ..shardplan.verify import verify_against, verify_set
    from .console import human_bytes, print_json
    from .progress import bytes_progress

    begin = time.monotonic()
    shard_set = ShardSet.open(directory)
    with bytes_progress("verifying") as progress:
        faults = verify_set(shard_set, progress)
    if against is not None and not faults:
        source = open_source(against, revision=revision)
        with bytes_progress("comparing") as progress:
            faults = verify_against(shard_set, source, progress)
    size = sum(tensor.bytes for rank in shard_set.plan.ranks for tensor in rank.tensors)
    if as_json:
        print_json(
            {
                "ok": not faults,
                "tp_size": shard_set.plan.tp_size,
                "fingerprint": shard_set.plan.fingerprint,
                "bytes": size,
                "against": against,
                "faults": faults,
                "seconds": time.monotonic() - begin,
            }
        )
    if faults:
        for fault in faults:
            log.error("%s: %s %s", directory / fault.file, fault.tensor, fault.reason)
        raise CheckpointError(
            f"{directory}: {len(faults)} faults, the first in {faults[0].file}: {faults[0].tensor} {faults[0].reason}",
            "copy the files again, or shard the checkpoint again",
        )
    if not as_json:
        compared = f" and equal {against}" if against is not None else ""
        print(f"ok: {len(shard_set.plan.ranks)} rank files, {human_bytes(size)}, are what the plan says{compared}")
