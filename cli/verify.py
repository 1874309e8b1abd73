"""`mgtp verify`: whether a shard set is what it was when it was written."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..shardplan.errors import CheckpointError, UsageError
from .app import app
from .launching import JsonOption

if TYPE_CHECKING:
    from ..shardplan.plan import ShardPlan
    from ..shardplan.shard_set import PlanFolder
    from ..shardplan.verify import Fault

log = logging.getLogger("mgtp.cli")

_SHOWN = 20  # faults on the terminal


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by mgtp shard.")],
    rank: Annotated[
        int | None, typer.Option(min=0, help="Check this rank's file alone, and the small files that are there.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also compare every tensor with this checkpoint, bit for bit.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="With --against: branch, tag or commit on the hub.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every tensor of a shard set again and compare it with the plan. Exits 3 when something is damaged or missing.

    JSON: ok, rank (as asked for, or null), tp_size and fingerprint (null where the plan cannot be read), bytes (hashed),
    against (or null), faults (file, tensor, reason), seconds.
    """
    from ..shardplan.shard_set import open_plan
    from ..shardplan.values import counted
    from ..shardplan.verify import Fault
    from .console import print_json

    begin = time.monotonic()
    if rank is not None and against is not None:
        raise UsageError(f"--rank {rank} does not go with --against, which compares all ranks", "leave one of them out")
    folder = None
    try:
        folder = open_plan(directory)
        if rank is not None and rank >= folder.plan.tp_size:
            raise UsageError(
                f"--rank {rank}: {directory} has {counted(folder.plan.tp_size, 'rank')}", "they count from 0"
            )
        faults = _verify(folder, rank)
        compared = against if not faults else None
        if compared is not None:
            faults = _compare(folder, compared, revision)
    except CheckpointError as error:
        if as_json:
            faults = [Fault("", "", error.message)]
            print_json(_document(folder and folder.plan, rank, against, faults, begin))
        raise
    if as_json:
        print_json(_document(folder.plan, rank, against, faults, begin))
    for fault in faults[:_SHOWN]:
        log.error("%s", fault)
    if faults:
        if len(faults) > _SHOWN:
            log.error("and %d more: --json has all", len(faults) - _SHOWN)
        raise _failure(directory, faults, compared)
    if not as_json:
        print(_summary(folder, rank, against))


def _verify(folder: PlanFolder, rank: int | None) -> list[Fault]:
    from ..shardplan.verify import verify_folder
    from .progress import bytes_progress

    with bytes_progress("verifying") as progress:
        faults = verify_folder(folder, rank, progress)
    missing = folder.missing(folder.plan.files)
    if missing and rank is not None:
        log.warning("not here, but needed to run the rank: %s", ", ".join(missing))
    return faults


def _compare(folder: PlanFolder, against: str, revision: str | None) -> list[Fault]:
    from ..shardplan.shard_set import ShardSet
    from ..shardplan.sources import open_source
    from ..shardplan.verify import verify_against
    from .progress import bytes_progress

    source = open_source(against, revision=revision)
    with bytes_progress("comparing") as progress:
        return verify_against(ShardSet.open(folder.path), source, progress)


def _failure(directory: Path, faults: list[Fault], compared: str | None) -> CheckpointError:
    """The error for `faults` of the set itself, or in comparison with a checkpoint."""
    from ..shardplan.values import counted

    if compared is not None:
        return CheckpointError(
            f"{directory} is not {compared} cut up: {counted(len(faults), 'difference')}, the first: {faults[0]}",
            f"compare with the checkpoint that it was made from, or shard {compared}",
        )
    return CheckpointError(
        f"{directory}: {counted(len(faults), 'fault')}, the first: {faults[0]}",
        "copy the files again, or shard the checkpoint again",
    )


def _summary(folder: PlanFolder, rank: int | None, against: str | None) -> str:
    from ..shardplan.values import counted
    from .console import human_bytes

    plan = folder.plan
    what = counted(plan.tp_size, "rank file") if rank is None else plan.ranks[rank].file
    compared = f" and equal {against}" if against is not None else ""
    return f"ok: {what}, {human_bytes(_hashed_bytes(plan, rank, []))}, as the plan says{compared}"


def _document(
    plan: ShardPlan | None, rank: int | None, against: str | None, faults: list[Fault], begin: float
) -> dict[str, object]:
    """The JSON document; `plan` is None where it could not be read."""
    return {
        "ok": not faults,
        "rank": rank,
        "tp_size": plan and plan.tp_size,
        "fingerprint": plan and plan.fingerprint,
        "bytes": _hashed_bytes(plan, rank, faults) if plan else 0,
        "against": against,
        "faults": faults,
        "seconds": time.monotonic() - begin,
    }


def _hashed_bytes(plan: ShardPlan, rank: int | None, faults: list[Fault]) -> int:
    """Bytes of all tensors whose file was there to be hashed."""
    if any(not fault.file for fault in faults):
        return 0
    left_out = {fault.file for fault in faults if not fault.tensor}
    ranks = plan.ranks if rank is None else [plan.ranks[rank]]
    return sum(tensor.bytes for r in ranks if r.file not in left_out for tensor in r.tensors)
