"""The `mgtp` program: global options, one line per error, exit codes.

Command modules import only light modules at the top; what is heavy is imported by the command that needs it, so that
`mgtp --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer

from ..shardplan.errors import MgtpError
from ..shardplan.values import escaped
from ..shardplan.version import __version__

app = typer.Typer(
    name="mgtp",
    help="Run language models that are larger than one GPU, on the GPUs of one node.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

COMMANDS = ("plan", "shard", "verify", "generate", "serve", "chat", "probe", "probe_memory", "bench", "cache")

LOG_LEVELS = ("debug", "info", "warning", "error")
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
END_SECONDS = 10.0
"""After a signal, the program has come to its end by then: stopping ranks takes 5 seconds at most."""

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Typer's own copy of click is private; its base classes are reached through the public BadParameter.
_USAGE_ERROR, _CLICK_ERROR = typer.BadParameter.__mro__[1:3]


@dataclass(frozen=True)
class Globals:
    """Options that stand before the command; `ctx.obj` of every command."""

    log_level: str = "info"
    debug: bool = False


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Like KeyboardInterrupt no Exception: logging, where it may strike, swallows those."""


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"mgtp {__version__}")
        raise typer.Exit()


@app.callback()
def _globals(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(help=f"What to report on stderr: {', '.join(LOG_LEVELS)}.", envvar="MGTP_LOG_LEVEL")
    ] = Globals.log_level,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and everything the ranks print.")] = False,
) -> None:
    """Cut checkpoints into one file per GPU and run them tensor-parallel."""
    from ..shardplan.errors import UsageError
    from .background import stderr_in_background
    from .console import set_up_logging

    if log_level not in LOG_LEVELS:
        raise UsageError(f"--log-level {log_level!r} is unknown", f"use one of {', '.join(LOG_LEVELS)}")
    ctx.obj = Globals("debug" if debug else log_level, debug)
    ctx.with_resource(stderr_in_background())
    set_up_logging(ctx.obj.log_level)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code; every failure is one line and a hint on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    values = [*arguments, *(a.partition("=")[2] for a in arguments)]
    fail = partial(_fail, names=[value for value in values if not value.isprintable()])
    debug = "--debug" in arguments
    _load_commands()
    _handle_signals()
    try:
        code = app(args=arguments, standalone_mode=False) or 0
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt  # of which Typer has made an exit code
        return code
    except MgtpError as error:
        return fail(error.message, error.hint, error.exit_code, debug)
    except _CLICK_ERROR as error:  # type: ignore[misc]
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            print(error.ctx.get_help(), file=sys.stderr)  # type: ignore[attr-defined]
            return 2
        usage = isinstance(error, _USAGE_ERROR) and getattr(error, "ctx", None)
        path = error.ctx.command_path if usage else "mgtp"  # type: ignore[attr-defined]
        return fail(_usage_message(error, arguments), f"see {path} --help", 2, debug)
    except (KeyboardInterrupt, typer.Abort):
        signal.setitimer(signal.ITIMER_REAL, 0)
        _abandon(sys.stdout)
        return fail("interrupted", "", EXIT_INTERRUPTED, debug)
    except Terminated:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _abandon(sys.stdout)
        return fail("terminated", "", EXIT_TERMINATED, debug)
    except BrokenPipeError:
        _abandon(sys.stdout)  # the reader of stdout has gone: nothing is left to say
        return 1
    except OSError as error:
        name = f"{error.filename}: " if error.filename else "standard output: " if _is_full(sys.stdout) else ""
        _abandon(sys.stdout)
        return fail(f"{name}{error.strerror or error}", "check the disk and the permissions, or --debug", 1, debug)
    except Exception as error:  # a fault of ours: still one line
        return fail(f"unexpected {type(error).__name__}: {error}", "run again with --debug and report it", 1, debug)


_NOT_A_NUMBER = {
    "Input should be a valid integer, unable to parse string as an integer": "not a whole number",
    "Input should be a valid number, unable to parse string as a number": "not a number",
}
"""What the library says of a value -> what we say."""


def _abandon(stream: Any) -> None:
    """Drop what stdout or stderr has not taken: the interpreter would wait for a reader that has stopped, or write to
    one that has gone."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (AttributeError, OSError, ValueError):
        pass  # closed, or no file


def _is_full(stream: Any) -> bool:
    """Whether stdout holds something that its file does not take. A pipe is not asked: it might never answer."""
    try:
        if stream.seekable():
            stream.flush()
    except (AttributeError, OSError, ValueError):
        return True
    return False


def _usage_message(error: Any, arguments: list[str]) -> str:
    """What Typer says, with the value it leaves out: `--tp-size 'x': ...`."""
    for option in getattr(getattr(error, "param", None), "opts", ()):
        values = [b for a, b in pairwise(arguments) if a == option]
        values += [a.removeprefix(f"{option}=") for a in arguments if a.startswith(f"{option}=")]
        if values:
            message = error.message.rstrip(".")
            return f"{option} {values[-1]!r}: {_NOT_A_NUMBER.get(message, message)}"
    return error.format_message().rstrip(".")


def _handle_signals() -> None:
    """Let the first signal end the program in order; what is ignored, as under nohup, stays so."""
    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    """Begin the end; it takes seconds at most, and further signals would only keep it from cleaning up.

    What a handler raises can be lost: C code that asks an object for an attribute may drop every error, as NumPy's
    comparisons do. So it is raised again when the end has not come in time.
    """
    for each in _ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    error = KeyboardInterrupt if number == signal.SIGINT else Terminated

    def end_again(number: int, frame: object) -> None:
        raise error

    signal.signal(signal.SIGALRM, end_again)
    signal.setitimer(signal.ITIMER_REAL, END_SECONDS, END_SECONDS)
    raise error


def _fail(message: str, hint: str, code: int, debug: bool, names: Sequence[str]) -> int:
    """Say what went wrong, with all of `names`, which have line breaks or control characters, escaped."""
    from .console import stderr_is_stuck

    if stderr_is_stuck():
        os._exit(code)  # everything is cleaned up; the interpreter would wait for that reader
    for name in names:
        message, hint = (text.replace(name, escaped(name)) for text in (message, hint))
    lines = [
        f"{what}: {escaped(' '.join(text.split()))}\n" for what, text in (("error", message), ("hint", hint)) if text
    ]
    try:
        if debug:
            traceback.print_exc()
        sys.stderr.writelines(lines)
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)  # full, or its reader has gone: the exit code says it too
    return code


def _load_commands() -> None:
    """Import the command modules, in the order in which help lists them: each registers itself on `app`."""
    for name in COMMANDS:
        import_module(f"{__package__}.{name}")


if __name__ == "__main__":
    sys.exit(main())
