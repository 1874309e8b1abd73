"""`mgtp cache`: the shard sets that commands made from checkpoints by themselves."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..shardplan.errors import UsageError
from .app import app
from .launching import JsonOption

if TYPE_CHECKING:
    from ..shardplan.cache import Entry

cache = typer.Typer(help="List or prune the shard sets made from checkpoints (in MGTP_CACHE).", no_args_is_help=True)
app.add_typer(cache, name="cache")

DAY_SECONDS = 86400

log = logging.getLogger("mgtp.cli")


@cache.command("list")
def list_sets(as_json: JsonOption = False) -> None:
    """List the cached shard sets, the longest unused first.

    JSON: folder, total_bytes, sets (path, source, tp_size and dtype, null when unfinished, bytes, used: seconds since
    the epoch).
    """
    from ..shardplan.cache import cache_folder, entries
    from ..shardplan.values import counted
    from .console import human_bytes, print_json

    found = entries()
    if not found:
        log.info("no shard sets in %s", cache_folder())
    if as_json:
        total = sum(e.bytes for e in found)
        print_json({"folder": str(cache_folder()), "total_bytes": total, "sets": [_document(e) for e in found]})
        return
    for entry in found:
        days = counted(int((time.time() - entry.used) // DAY_SECONDS), "day")
        what = f"tp {entry.tp_size}, {entry.dtype}" if entry.tp_size else "unfinished"
        print(f"{entry.path}  {human_bytes(entry.bytes)}  {what}, used {days} ago, from {entry.source}")


@cache.command("prune")
def prune_sets(
    older_than: Annotated[
        int | None, typer.Option(min=0, help="Remove sets unused for more than this many days.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Then remove the longest unused down to this size, as 100GiB.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all of them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove cached shard sets. Those that a command runs or writes are left alone, and named.

    JSON: removed and skipped (as in list), freed_bytes.
    """
    from ..shardplan.cache import prune
    from ..shardplan.quantities import parse_sizes
    from .console import human_bytes, print_json

    if not everything and older_than is None and max_size is None:
        raise UsageError("nothing says what to remove", "give --older-than DAYS, --max-size SIZE or --all")
    limit = 0 if everything else sum(parse_sizes(max_size, "--max-size")) if max_size is not None else None
    removed, skipped = prune(max_bytes=limit, unused_seconds=None if older_than is None else older_than * DAY_SECONDS)
    freed = sum(entry.bytes for entry in removed)
    if as_json:
        lists = {"removed": [_document(e) for e in removed], "skipped": [_document(e) for e in skipped]}
        print_json({**lists, "freed_bytes": freed})
        return
    for entry in skipped:
        log.warning("kept %s: a command is using or writing it", entry.path)
    for entry in removed:
        print(f"removed {entry.path}")
    print(f"freed {human_bytes(freed)}")


def _document(entry: Entry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "source": entry.source,
        "tp_size": entry.tp_size,
        "dtype": entry.dtype,
        "bytes": entry.bytes,
        "used": entry.used,
    }
