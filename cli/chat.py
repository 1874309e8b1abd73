"""`mgtp chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..shardplan.errors import MgtpError, UsageError
from .app import app
from .launching import (
    CpSizeOption,
    DeviceOption,
    DevicesOption,
    MaxModelLenOption,
    SharedDeviceOption,
    TpSizeOption,
    launch_options,
)
from .options import flag
from .sampling_options import SeedOption, TemperatureOption, TopPOption, sampling_params

if TYPE_CHECKING:
    from ..runtime.chat_session import Conversation, LocalAnswers, RemoteAnswers
    from ..runtime.launch.start import LaunchOptions
    from ..shardplan.sources.base import Source

HELP = "/clear begins again, /system TEXT sets the system message, Ctrl-C stops an answer, /exit or Ctrl-D ends"


@app.command()
def chat(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="[URL|DIR]", help="A server's address, or a shard set to run for this chat.")
    ] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="MGTP_API_KEY")] = None,
    tp_size: TpSizeOption = None,
    cp_size: CpSizeOption = 1,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    allow_shared_device: SharedDeviceOption = False,
    max_model_len: MaxModelLenOption = None,
) -> None:
    """Talk to a model: one line in, an answer out, as it comes. /clear begins again, /exit or Ctrl-D ends.

    Ctrl-C stops an answer, or ends what waits for a line. Answers go to stdout. Without a terminal, every line of stdin is
    said in turn, and a failure ends the command, as Ctrl-C does.
    """
    from ..runtime.chat_session import Conversation
    from .background import watched_stdout

    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    ranks = {"cp_size": cp_size, "device": device, "devices": devices, "allow_shared_device": allow_shared_device}
    ranks["max_model_len"] = max_model_len
    if _is_address(target):
        _refuse_rank_options(target, {**ranks, "tp_size": tp_size}, ctx)
    launch = launch_options(ctx, max_num_seqs=1, **ranks)
    with _answers(target, tp_size, launch, api_key, options) as answers, watched_stdout(answers.check) as write:
        _talk(Conversation(answers, system), answers.model, write)


def _is_address(target: str) -> bool:
    """Whether a server is meant; one without a scheme is refused."""
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", target, re.ASCII) and not Path(target).exists():
        raise UsageError(f"{target}: no such folder", f"a server's address begins with http://, as http://{target}")
    return target.lower().startswith(("http://", "https://"))


def _refuse_rank_options(target: str, ranks: Mapping[str, Any], ctx: typer.Context) -> None:
    """Raise UsageError for an option of ranks: a server has its own."""
    defaults = {parameter.name: parameter.default for parameter in ctx.command.params}
    given = next((name for name, value in ranks.items() if value != defaults[name]), None)
    if given is not None:
        raise UsageError(f"{flag(given)} is for a shard set, {target} is a server", f"leave {flag(given)} out")


@contextmanager
def _answers(
    target: str, tp_size: int | None, launch: LaunchOptions, api_key: str | None, options: dict[str, Any]
) -> Iterator[LocalAnswers | RemoteAnswers]:
    """Who answers: a server, or ranks that run for as long as the block does."""
    from ..runtime.chat_session import LocalAnswers, RemoteAnswers, check_chat
    from .before_sharding import small_files
    from .launching import open_set, running

    def check_files(folder: Path, config: Mapping[str, Any]) -> None:
        check_chat(folder, config)
        sampling_params(folder, None, {name: value for name, value in options.items() if value is not None})

    def check(checkpoint: Source) -> None:
        with small_files(checkpoint) as folder:
            check_files(folder, checkpoint.config)

    if _is_address(target):
        yield RemoteAnswers(target, api_key, options)
        return
    shard_set = open_set(target, tp_size, check=check)
    check_files(shard_set.path, shard_set.config)
    with running(shard_set, launch) as started:
        yield LocalAnswers(started, shard_set, options)


def _talk(conversation: Conversation, model: str, write: Callable[[str], None]) -> None:
    """Read, answer, and so on until the input ends."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() its line editing

        print(f"{model}: {HELP}", file=sys.stderr)
    for line in _lines(interactive):
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command == "/clear":
            conversation.clear()
        elif command == "/system":
            conversation.system = rest.strip() or None
        elif command.startswith("/") and interactive:
            print(HELP, file=sys.stderr)
        elif line.strip():
            _answer(conversation, line, interactive, write)


def _answer(conversation: Conversation, line: str, interactive: bool, write: Callable[[str], None]) -> None:
    """Print an answer as it comes; neither a failure nor Ctrl-C ends a conversation that a person is having."""
    pieces = conversation.say(line)
    try:
        with _interruptible() if interactive else nullcontext(), closing(pieces):
            for piece in pieces:
                write(piece)
    except MgtpError as error:
        if not interactive or error.exit_code == 5:
            raise
        print(f"error: {error.message}", file=sys.stderr)
    write("\n")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the block alone."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = _typed() if interactive else sys.stdin.buffer.readline().decode()
            line.encode()
        except EOFError:
            return
        except UnicodeError as error:
            raise UsageError(f"the input is not UTF-8: {error}", "convert it, for instance with iconv") from None
        if not interactive and not line:
            return
        yield line.rstrip("\n")


def _typed() -> str:
    """A line that somebody types; the prompt is no part of the output."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()
