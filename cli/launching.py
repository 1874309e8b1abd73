"""What the commands that start ranks share: their options, and showing how far the ranks are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..shardplan.errors import CheckpointError, UsageError
from .options import finite, positive

if TYPE_CHECKING:
    from ..runtime.launch.start import LaunchOptions, StartedGroup
    from ..shardplan.plan import ShardPlan
    from ..shardplan.shard_set import ShardSet
    from ..shardplan.sources.base import Source

log = logging.getLogger("mgtp.cli")

ShardSetArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="A folder written by mgtp shard; or a checkpoint, which is sharded once into the cache."
    ),
]
TpSizeOption = Annotated[
    int | None,
    typer.Option(callback=positive, help="Ranks. A shard set has its own, which is checked; a checkpoint needs it."),
]
CpSizeOption = Annotated[
    int,
    typer.Option(
        callback=positive, help="Ranks that share out sequences and KV cache; there are tp size x cp size in all."
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option(help="A shard set has its own, fixed when sharding; for a checkpoint: as in mgtp shard.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cuda or cpu; auto takes GPUs where there are any.")]
DevicesOption = Annotated[str | None, typer.Option(help="Indices of the GPUs to use, one a rank, such as 0,2.")]
SharedDeviceOption = Annotated[
    bool, typer.Option("--allow-shared-device", help="Let several ranks use one GPU (slow; to try out a tp size).")
]
StepTimeoutOption = Annotated[
    float | None,
    typer.Option(
        min=0.1, callback=finite, help="Longest time for a step, in seconds; default: 60 on GPUs, 600 on the CPU."
    ),
]
CollectiveOption = Annotated[
    str,
    typer.Option(
        help="What runs sums over ranks: auto, nccl, host or oneshot; see docs/parallelism.md.", metavar="BACKEND"
    ),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(callback=positive, help="Longest prompt and answer in tokens; default: the model's, or what fits."),
]
MaxNumSeqsOption = Annotated[
    int | None, typer.Option(callback=positive, help="Most sequences to run at once; default: 16.")
]
KvCacheMemoryOption = Annotated[
    str | None, typer.Option(help="KV cache of every rank, such as 8GiB; default: most of what is free.")
]
BlockSizeOption = Annotated[
    int | None, typer.Option(callback=positive, help="Tokens of a KV cache block, a power of two.")
]
EnforceEagerOption = Annotated[
    bool, typer.Option("--enforce-eager", help="Launch kernels one by one instead of replaying CUDA graphs.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify-on-load", help="Hash all weights before anything is started, as mgtp verify does.")
]
DummyWeightsOption = Annotated[
    bool, typer.Option("--dummy-weights", help="The model is a config.json or its folder; weights are random.")
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


def launch_options(
    ctx: typer.Context, *, devices: str | None, kv_cache_memory: str | None = None, **others: Any
) -> LaunchOptions:
    """The options of a run, as the command line spells them; what is None keeps its default."""
    from ..runtime.launch.start import LaunchOptions

    given = {"devices": parse_devices(devices), "kv_cache_bytes": _kv_cache_bytes(kv_cache_memory), **others}
    return LaunchOptions(log_level=ctx.obj.log_level, **{k: v for k, v in given.items() if v is not None})


def _kv_cache_bytes(text: str | None) -> int | None:
    """The value of --kv-cache-memory in bytes."""
    from ..shardplan.quantities import parse_sizes

    if text is None:
        return None
    sizes = parse_sizes(text, "--kv-cache-memory")
    if len(sizes) != 1:
        raise UsageError(f"--kv-cache-memory {text!r} must be one size, the same for every rank", "such as 8GiB")
    return sizes[0]


def open_set(
    model: str,
    tp_size: int | None,
    dtype: str | None = None,
    revision: str | None = None,
    verify: bool = False,
    dummy: bool = False,
    check: Callable[[Source], None] = lambda source: None,
) -> ShardSet:
    """The shard set to run, checked strictly: `model` itself, or the cached set of the checkpoint that it is.

    A --tp-size or --dtype other than the set's own is refused. With `verify`, the weights' hashes are checked too. With
    `dummy`, the set that sharding would give for the config.json that `model` is, on one rank unless told otherwise.
    `check` may refuse a checkpoint before it is sharded.
    """
    if dummy:
        return _dummy_set(model, tp_size or 1, dtype or "auto", {"--revision": revision, "--verify-on-load": verify})
    shard_set = _find_set(model, tp_size, dtype, revision, check)
    if verify:
        _verify(shard_set)
    return shard_set


def _dummy_set(model: str, tp_size: int, dtype: str, others: Mapping[str, Any]) -> ShardSet:
    """A set of random weights; raises UsageError for an option that is about real ones."""
    from ..runtime.dummy import dummy_shard_set

    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(f"{given[0]} does not go with --dummy-weights", "leave one of the two out")
    return dummy_shard_set(Path(model), tp_size, dtype)


def _verify(shard_set: ShardSet) -> None:
    """Raise CheckpointError unless every tensor of every rank has the plan's hash."""
    from ..shardplan.values import counted
    from ..shardplan.verify import verify_set
    from .progress import bytes_progress

    with bytes_progress("verifying") as progress:
        faults = verify_set(shard_set, progress)
    if faults:
        raise CheckpointError(
            f"{shard_set.path}: {counted(len(faults), 'fault')}, the first: {faults[0]}", "see mgtp verify"
        )


def _find_set(
    model: str, tp_size: int | None, dtype: str | None, revision: str | None, check: Callable[[Source], None]
) -> ShardSet:
    from ..shardplan.dtypes import safetensors_name
    from ..shardplan.in_use import hold
    from ..shardplan.shard_set import ShardSet

    path = Path(model)
    if _is_checkpoint(path):
        return _from_cache(model, tp_size, dtype, revision, check)
    if revision is not None:
        raise UsageError(f"--revision {revision}: {model} is a folder", "revisions belong to models on the hub")
    shard_set = ShardSet.open(path, tp_size=tp_size)
    stored = shard_set.plan.dtype
    if dtype not in (None, "auto", stored):
        safetensors_name(dtype)
        raise UsageError(
            f"--dtype {dtype}: {model} holds {stored} weights",
            f"shard the checkpoint again: mgtp shard MODEL --tp-size {shard_set.plan.tp_size} --dtype {dtype}",
        )
    return replace(shard_set, in_use=hold(path))


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is to be taken for a checkpoint: a hub id, a file, or a folder that mgtp shard did not write."""
    if not path.is_dir():
        return True
    from ..shardplan.output_folder import State, inspect

    return inspect(path) is State.OTHER


def _from_cache(
    model: str, tp_size: int | None, dtype: str | None, revision: str | None, check: Callable[[Source], None]
) -> ShardSet:
    from ..shardplan.cache import cached_set
    from ..shardplan.sources import open_source
    from .progress import bytes_progress

    source = open_source(model, revision=revision)
    if tp_size is None:
        raise UsageError(f"{model} is a checkpoint: how many ranks?", "add --tp-size N, or run a folder of mgtp shard")
    check(source)
    with bytes_progress("sharding") as progress:

        def announce(path: Path, plan: ShardPlan) -> None:
            for note in plan.notes:
                log.warning("%s: %s", model, note)

        shard_set = cached_set(source, tp_size, dtype or "auto", on_write=announce, progress=progress)
    log.info("running %s", shard_set.path)
    return shard_set


def check_launch(shard_set: ShardSet, options: LaunchOptions) -> None:
    """Raise UsageError or DeviceError for ranks that cannot be started, before anything is made for each of them."""
    from ..runtime.launch.room import check_memory
    from ..runtime.launch.start import check_sizes

    check_sizes(shard_set, options)
    check_memory(shard_set, options)


@contextmanager
def running(shard_set: ShardSet, options: LaunchOptions) -> Iterator[StartedGroup]:
    """Ranks of `shard_set`, started with progress on stderr, and gone when the block ends."""
    from ..runtime.launch.start import start_ranks
    from ..shardplan.values import counted

    check_launch(shard_set, options)
    with show_stages(shard_set.plan.tp_size * options.cp_size) as on_stage:
        started = start_ranks(shard_set, options, on_stage)
    with started.group:
        tokens = started.ready[0].kv_cache_tokens
        ranks = counted(len(started.ready), "rank")
        log.info("%s ready in %.1f s, KV cache for %d tokens", ranks, started.seconds, tokens)
        yield started


def stage_logger(num_ranks: int) -> Callable[[int, str], None]:
    """A callback for stages that logs a line when the last rank has come to one."""
    from ..runtime.stages import SPAWN, position

    stages: dict[int, str] = {}

    def log_stage(rank: int, stage: str) -> None:
        before = min(stages.values(), key=position, default=SPAWN)
        _note(stages, num_ranks, rank, stage)
        if (now := min(stages.values(), key=position)) != before:
            log.info("starting: %s", now)

    return log_stage


@contextmanager
def show_stages(num_ranks: int) -> Iterator[Callable[[int, str], None]]:
    """A callback for stages: a live line on a terminal, otherwise log lines."""
    from .console import stderr_is_terminal

    if not stderr_is_terminal():
        yield stage_logger(num_ranks)
        return
    from rich.console import Console

    stages: dict[int, str] = {}
    console = Console(stderr=True)
    with console.status("starting") as status:

        def on_stage(rank: int, stage: str) -> None:
            _note(stages, num_ranks, rank, stage)
            status.update("starting: " + ", ".join(f"rank {r} {s}" for r, s in stages.items()))

        yield on_stage


def _note(stages: dict[int, str], num_ranks: int, rank: int, stage: str) -> None:
    """Keep the stage of one of `num_ranks`, whose number has been found possible by the time that there is news."""
    from ..runtime.stages import SPAWN

    if not stages:
        stages |= dict.fromkeys(range(num_ranks), SPAWN)
    stages[rank] = stage
