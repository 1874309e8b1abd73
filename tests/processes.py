"""Running `mgtp` as users do, and making sure that nothing of it is left."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

COMMAND_SECONDS = 120
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Finished:
    """What a command left: exit code, stdout and stderr."""

    code: int
    out: str
    err: str


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """The test's environment with run folders under `folder`; files that nobody closes are reported."""
    clean = {k: v for k, v in os.environ.items() if k not in ("XDG_RUNTIME_DIR", "MGTP_LOG_LEVEL")}
    return {**clean, "TMPDIR": str(folder), "PYTHONWARNINGS": "default::ResourceWarning", **extra}


def start(folder: Path, *arguments: str, module: str = "mgtp.cli", **extra: str) -> subprocess.Popen[str]:
    """`mgtp` with `arguments`, its run folders under `folder`; `module` stands in for the program."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment(folder, **extra),
        cwd=REPOSITORY if module.startswith("tests.") else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def mgtp(folder: Path, *arguments: str, code: int | None = 0, **extra: str) -> Finished:
    """Run to the end; checks the exit code, the form of errors, and that no process or folder is left."""
    process = start(folder, *arguments, **extra)
    try:
        out, err = process.communicate(timeout=COMMAND_SECONDS)
    except BaseException:
        process.kill()
        raise
    assert code is None or process.returncode == code, f"exit code {process.returncode}, stderr:\n{err}"
    assert "Traceback" not in err and "ResourceWarning" not in err, err
    assert_nothing_left(folder)
    return Finished(process.returncode, out, err)


def mgtp_here(*arguments: str, code: int = 0) -> Finished:
    """The same in this process, in a tenth of the time: for commands that start no other."""
    from mgtp.cli.app import main

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        found = main(list(arguments))
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    assert found == code, f"exit code {found}, stderr:\n{err}"
    assert "Traceback" not in err, err
    return Finished(found, out, err)


@contextmanager
def run_folders() -> Iterator[Path]:
    """A place for run folders, with a path shorter than pytest's own: those of Unix sockets are limited.

    What was started with it and still runs when the block ends is killed, so that a test that fails leaves nothing.
    """
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as name:
        try:
            yield Path(name)
        finally:
            for pid in _with_variable(f"TMPDIR={name}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def rank_pids(folder: Path) -> list[int]:
    """Processes whose run folder lies under `folder`."""
    return _with_variable(f"MGTP_RUN_FOLDER={folder}")


def _with_variable(beginning: str) -> list[int]:
    """Processes that have an environment variable of which this is the beginning."""
    mark, found = beginning.encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(v.startswith(mark) for v in variables):
                found.append(int(entry.name))
    return sorted(found)


def rank_pid(folder: Path, rank: int) -> int:
    """The process of one rank whose run folder lies under `folder`."""
    for pid in rank_pids(folder):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no rank {rank}")


def wait_for_ranks(folder: Path, count: int, seconds: float = 60) -> list[int]:
    """Wait until `count` rank processes run; their pids."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pids = rank_pids(folder)
        if len(pids) >= count:
            return pids
        time.sleep(0.05)
    raise AssertionError(f"{count} ranks did not start within {seconds} s")


def assert_nothing_left(folder: Path, seconds: float = 5) -> None:
    """Fail when rank processes or run folders under `folder` are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = [*rank_pids(folder), *(p.name for p in folder.glob("mgtp-*"))]
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
