"""`mgtp serve`: an OpenAI-compatible HTTP server over the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
    KvCacheMemoryOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    RevisionOption,
    ShardSetArgument,
    SharedDeviceOption,
    StepTimeoutOption,
    TpSizeOption,
    VerifyOption,
    launch_options,
    open_set,
)
from .nodes import open_node_set, refuse_for_nodes
from .options import finite

if TYPE_CHECKING:
    from socket import socket

    from ..runtime.launch.start import LaunchOptions
    from ..runtime.server.options import ServerOptions
    from ..shardplan.shard_set import ShardSet

LOG_FORMATS = ("text", "json")
RESTART_POLICIES = ("never", "on-failure")
DEFAULT_MAX_RESTARTS = 5


@app.command()
def serve(
    ctx: typer.Context,
    directory: ShardSetArgument,
    tp_size: TpSizeOption = None,
    cp_size: CpSizeOption = 1,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reachable from this machine only.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests; default: the folder's.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Serve another shard set too, under this name (repeatable)."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Ask for this key ('Authorization: Bearer KEY').", envvar="MGTP_API_KEY")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Most sequences to wait; more are refused (429).")] = 1024,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Longest time for a request, in seconds.")
    ] = 600,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=finite, help="On SIGTERM, how long running requests may go on, in seconds.")
    ] = 30,
    restart: Annotated[
        str,
        typer.Option(help="When a rank has failed: never ends the server with code 5, on-failure starts all again."),
    ] = "never",
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Most restarts within 10 minutes, then the server ends (default: {DEFAULT_MAX_RESTARTS})."
        ),
    ] = None,
    max_n: Annotated[int, typer.Option(min=1, help="Most answers to one prompt (n).")] = 16,
    max_logprobs: Annotated[int, typer.Option(min=0, max=20, help="Most log-probabilities a token.")] = 20,
    max_stop: Annotated[int, typer.Option(min=0, help="Most stop strings of a request.")] = 16,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 8 << 20,
    admin: Annotated[
        bool, typer.Option("--admin", help="Let whoever has the key change what is served, at /admin/.")
    ] = False,
    model_root: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder below which /admin/ finds shard sets.")
    ] = None,
    log_format: Annotated[str, typer.Option(help=f"Form of the log on stderr: {' or '.join(LOG_FORMATS)}.")] = "text",
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    verify_on_load: VerifyOption = False,
    dummy_weights: DummyWeightsOption = False,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    allow_shared_device: SharedDeviceOption = False,
    collective: CollectiveOption = "auto",
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    kv_cache_memory: KvCacheMemoryOption = None,
    block_size: BlockSizeOption = None,
    enforce_eager: EnforceEagerOption = False,
    step_timeout: StepTimeoutOption = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines that run the ranks together (docs/multi-node.md).")] = 1,
    node_rank: Annotated[int | None, typer.Option(help="Which of them this is; requests go to 0.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Node 0's address; it and the next two ports are used.")
    ] = None,
) -> None:
    """Serve a shard set over HTTP, in OpenAI's form, one process per device.

    Paths: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /ready, /metrics. The port
    is bound before anything is loaded. SIGTERM lets running requests finish and exits with 0; a second one exits at once.
    """
    if log_format not in LOG_FORMATS:
        raise UsageError(f"--log-format {log_format!r} is unknown", f"use {' or '.join(LOG_FORMATS)}")
    api_key = _key(api_key)
    limit, root = _max_restarts(restart, max_restarts), _model_root(admin, model_root, api_key)
    launch = launch_options(
        ctx,
        cp_size=cp_size,
        device=device,
        devices=devices,
        allow_shared_device=allow_shared_device,
        collective=collective,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        enforce_eager=enforce_eager,
        step_timeout=step_timeout,
    )
    from ..runtime.launch.node import run_node
    from ..runtime.launch.start import check_sizes
    from ..runtime.server.life import bind
    from ..runtime.server.model import check_name
    from ..runtime.server.options import ServerOptions
    from .console import log_in_background, set_up_logging

    options = ServerOptions(
        api_key=api_key,
        max_num_seqs=launch.max_num_seqs,
        max_queue=max_queue,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        max_restarts=limit,
        max_n=max_n,
        max_logprobs=max_logprobs,
        max_stop=max_stop,
        max_body_bytes=max_body_bytes,
        model_root=root,
        verify_on_load=verify_on_load,
    )
    set_up_logging(ctx.obj.log_level, log_format)
    ctx.with_resource(log_in_background())
    name = os.path.basename(os.path.abspath(directory)) if os.path.exists(directory) else directory
    name = name if served_model_name is None else served_model_name
    others = _named_folders(model or (), name)
    for each in (name, *others):
        check_name(each)
    if nnodes > 1 or node_rank is not None or rendezvous is not None:
        one_node_only = {"cp_size": cp_size > 1, "model": model, "admin": admin, "dtype": dtype, "revision": revision}
        one_node_only |= {"dummy_weights": dummy_weights}
        refuse_for_nodes(restart=limit > 0, verify=verify_on_load, **one_node_only)
        shard_set, cluster = open_node_set(directory, tp_size, nnodes, node_rank, rendezvous)
        launch = replace(launch, cluster=cluster)
        if cluster.node > 0:
            run_node(shard_set, launch)
            return
        sock = bind(host, port)
    else:
        sock = bind(host, port)
        shard_set = open_set(directory, tp_size, dtype, revision, verify_on_load, dummy_weights)
    check_sizes(shard_set, launch)
    sets = {other: open_set(folder, None, verify=verify_on_load) for other, folder in others.items()}
    _run({name: shard_set, **sets}, launch, options, sock)


def _key(given: str | None) -> str | None:
    """The key to ask for, without the line break that a file may have brought along, which no header can hold.

    An empty variable is as a rule one that was to be filled: serving without a key instead would let everybody in.
    """
    if given is None and "MGTP_API_KEY" not in os.environ:
        return None
    key = (given or "").strip()
    if not (key and key.isprintable()):
        what = "holds what cannot be printed" if key else "is empty"
        raise UsageError(
            f"the API key {what}", "give another one; without --api-key and MGTP_API_KEY nobody is asked for one"
        )
    return key


def _max_restarts(restart: str, given: int | None) -> int:
    """How often ranks may be started again; raises UsageError for an unknown policy, or a limit without one."""
    if restart not in RESTART_POLICIES:
        raise UsageError(f"--restart {restart!r} is unknown", f"use {' or '.join(RESTART_POLICIES)}")
    if restart == "never":
        if given is not None:
            raise UsageError(f"--max-restarts {given} has no effect with --restart never", "add --restart on-failure")
        return 0
    return DEFAULT_MAX_RESTARTS if given is None else given


def _model_root(admin: bool, given: str | None, api_key: str | None) -> Path | None:
    """The folder that /admin/ may load from, None without it; raises UsageError for half of what it needs."""
    if not admin:
        if given is not None:
            raise UsageError(f"--model-root {given} has no effect without --admin", "add --admin, or leave it out")
        return None
    if api_key is None:
        raise UsageError("--admin needs a key: anyone could change what is served", "set MGTP_API_KEY")
    if given is None:
        raise UsageError("--admin needs --model-root", "name the folder in which shard sets may be loaded from")
    root = Path(given)
    if not root.is_dir():
        raise UsageError(f"--model-root {given} is not a folder", "name the folder in which the shard sets are")
    return root.resolve()


def _named_folders(given: Sequence[str], first: str) -> dict[str, str]:
    """What --model names: folders by name; raises UsageError for one without a name, or a name that is taken."""
    folders: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise UsageError(f"--model {text!r} is not NAME=DIR", "such as --model small=llama-tp2")
        if name == first or name in folders:
            raise UsageError(f"--model {text!r}: two models are named {name!r}", "give each a name of its own")
        folders[name] = folder
    return folders


def _run(sets: Mapping[str, ShardSet], launch: LaunchOptions, options: ServerOptions, sock: socket) -> None:
    import asyncio

    from ..runtime.server.life import Life
    from .launching import stage_logger

    on_stage = stage_logger(max(each.plan.tp_size for each in sets.values()) * launch.cp_size)
    code = asyncio.run(Life(sets, launch, options, sock).run(on_stage))
    if code:
        raise typer.Exit(code)
