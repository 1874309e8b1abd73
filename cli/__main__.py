"""The `mgtp` program from its first moment on: what is imported here takes no time."""

import io
import os
import signal
import sys


def main() -> int:
    """Run the program; a signal that comes before it has begun ends it without a word."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale lacks is written as an escape
            stream.reconfigure(errors="backslashreplace")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_, code=code: os._exit(code))
    from .app import main as run

    return run()


def open_standard_streams() -> None:
    """Let streams that whoever started us has closed go nowhere: files opened later would take their place."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


if __name__ == "__main__":
    sys.exit(main())
