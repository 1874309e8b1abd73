"""`mgtp verify`: whether a shard set is what it was when it was written."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..shardplan.errors import CheckpointError
from .app import app
from .launching import JsonOption

if TYPE_CHECKING:
    from ..shardplan.plan import ShardPlan
    from ..shardplan.verify import Fault

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

    JSON: ok, tp_size and fingerprint (null where the plan cannot be read), bytes (hashed), against (or null), faults
    (file, tensor, reason), seconds.
    """
    from ..shardplan.shard_set import ShardSet
    from ..shardplan.sources import open_source
    from ..shardplan.values import counted
    from ..shardplan.verify import Fault, verify_against, verify_set
    from .console import human_bytes, print_json
    from .progress import bytes_progress

    begin = time.monotonic()
    try:
        shard_set = ShardSet.open_plan(directory)
    except CheckpointError as error:
        if as_json:
            print_json(_document(None, against, [Fault("", "", error.message)], begin))
        raise
    with bytes_progress("verifying") as progress:
        faults = verify_set(shard_set, progress)
    if against is not None and not faults:
        source = open_source(against, revision=revision)
        with bytes_progress("comparing") as progress:
            faults = verify_against(shard_set, source, progress)
    if as_json:
        print_json(_document(shard_set.plan, against, faults, begin))
    if faults:
        for fault in faults:
            log.error("%s", fault)
        raise CheckpointError(
            f"{directory}: {counted(len(faults), 'fault')}, the first in {faults[0]}",
            "copy the files again, or shard the checkpoint again",
        )
    if not as_json:
        compared = f" and equal {against}" if against is not None else ""
        size = human_bytes(_hashed_bytes(shard_set.plan, faults))
        print(f"ok: {counted(len(shard_set.plan.ranks), 'rank file')}, {size}, as the plan says{compared}")


def _document(plan: ShardPlan | None, against: str | None, faults: list[Fault], begin: float) -> dict[str, object]:
    """The JSON document; `plan` is None where it could not be read."""
    return {
        "ok": not faults,
        "tp_size": plan and plan.tp_size,
        "fingerprint": plan and plan.fingerprint,
        "bytes": _hashed_bytes(plan, faults) if plan else 0,
        "against": against,
        "faults": faults,
        "seconds": time.monotonic() - begin,
    }


def _hashed_bytes(plan: ShardPlan, faults: list[Fault]) -> int:
    """Bytes of all tensors whose file was there to be hashed."""
    left_out = {fault.file for fault in faults if not fault.tensor}
    return sum(tensor.bytes for rank in plan.ranks if rank.file not in left_out for tensor in rank.tensors)
