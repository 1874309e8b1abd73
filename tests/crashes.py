"""Processes that end in the middle of a shard run: at a chosen call that changes files, or killed at a chosen moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = ("pwrite", "ftruncate", "replace", "rename", "unlink", "mkdir", "fsync", "write")
EXIT_CODE = 77


def dies_at(call: int, work: Callable[[], Any]) -> bool:
    """Run `work` in a child that ends, as if killed, just before its `call`-th change of a file; false if it got through.

    A write is torn: its first half reaches the file.
    """
    child = os.fork()
    if child == 0:
        _count_down(call)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, EXIT_CODE), f"the child failed with {code}"
    return code == EXIT_CODE


def _count_down(call: int) -> None:
    """Replace every function of `os` that changes files by one that ends the process when its turn comes."""
    left = [call]

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call_it(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "pwrite":
                    original(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                os._exit(EXIT_CODE)
            return original(*args, **kwargs)

        return call_it

    for name in _CHANGES:
        setattr(os, name, counted(getattr(os, name), name))


def killed_after(seconds: float, *arguments: str) -> bool:
    """Run `mgtp` with `arguments` and kill it with -9 after `seconds`; false if it had ended by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mgtp.cli", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return True
    assert process.returncode == 0, errors.decode()
    return False


def run_seconds(*arguments: str) -> float:
    """How long an undisturbed run of `mgtp` takes."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-m", "mgtp.cli", *arguments], check=True, capture_output=True)
    return time.monotonic() - begin


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
