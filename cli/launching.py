"""What the commands that start ranks share: their options, and showing how far the ranks are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..shardplan.errors import UsageError

if TYPE_CHECKING:
    from ..runtime.launch.start import LaunchOptions, StartedGroup
    from ..shardplan.shard_set import ShardSet

log = logging.getLogger("mgtp.cli")

ShardSetArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by mgtp shard.")]
TpSizeOption = Annotated[int | None, typer.Option(help="Must be the set's own; checked when given.")]
DtypeOption = Annotated[str | None, typer.Option(help="Must be the set's own: the dtype is fixed when sharding.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cuda or cpu; auto takes GPUs where there are any.")]
DevicesOption = Annotated[str | None, typer.Option(help="Indices of the GPUs to use, one a rank, such as 0,2.")]
SharedDeviceOption = Annotated[
    bool, typer.Option("--allow-shared-device", help="Let several ranks use one GPU (slow; to try out a tp size).")
]
MaxModelLenOption = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt and answer in tokens; default: the model's, or what fits.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def parse_devices(text: str | None) -> tuple[int, ...] | None:
    """'0,2' as indices; raises UsageError naming the part that is no number."""
    if text is None:
        return None
    parts = text.split(",")
    for part in parts:
        if not part.strip().isdecimal():
            raise UsageError(f"--devices {text!r}: {part!r} is not a device index", "give indices such as 0,2")
    return tuple(int(part) for part in parts)


def open_set(directory: Path, tp_size: int | None, dtype: str | None = None) -> ShardSet:
    """The shard set, checked strictly; a --tp-size or --dtype other than its own is refused."""
    from ..shardplan.shard_set import ShardSet

    shard_set = ShardSet.open(directory, tp_size=tp_size)
    stored = shard_set.plan.dtype
    if dtype not in (None, "auto", stored):
        raise UsageError(
            f"--dtype {dtype}: {directory} holds {stored} weights",
            f"write such a set: mgtp shard {directory} --tp-size {shard_set.plan.tp_size} --dtype {dtype} --out DIR",
        )
    return shard_set


@contextmanager
def running(shard_set: ShardSet, options: LaunchOptions) -> Iterator[StartedGroup]:
    """Ranks of `shard_set`, started with progress on stderr, and gone when the block ends."""
    from ..runtime.launch.start import start_ranks

    with _progress(shard_set.plan.tp_size) as on_stage:
        started = start_ranks(shard_set, options, on_stage)
    with started.group:
        tokens = started.ready[0].kv_cache_tokens
        log.info("%d rank(s) ready in %.1f s, KV cache for %d tokens", len(started.ready), started.seconds, tokens)
        yield started


@contextmanager
def _progress(tp_size: int):  # noqa: ANN202 - a generator of a callback
    """A callback for stages: a live line on a terminal, nothing otherwise (a line per rank and stage says too much)."""
    from .console import stderr_is_terminal

    if not stderr_is_terminal():
        yield None
        return
    from rich.console import Console

    stages = {rank: "spawn" for rank in range(tp_size)}
    console = Console(stderr=True)
    with console.status("starting") as status:

        def on_stage(rank: int, stage: str) -> None:
            stages[rank] = stage
            status.update("starting: " + ", ".join(f"rank {r} {s}" for r, s in stages.items()))

        yield on_stage
