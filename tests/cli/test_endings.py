"""How runs end, however they are ended: signals at every stage, Ctrl-Z, readers that stop, disks that are full."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from mgtp.runtime.launch import run_folder as run_folder_module
from mgtp.runtime.stages import ORDER, RUNNING, SPAWN
from tests.fault_matrix import start_faulty
from tests.processes import assert_nothing_left, environment, mgtp, rank_pid, rank_pids, start, wait_for_ranks
from tests.servers import wait_for

END_SECONDS = 15
"""The promise is 5 s; a busy machine gets more."""

GENERATE = ("--prompt", "x", "--ignore-eos", "--device", "cpu", "--temperature", "0")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGKILL: -9}
MATRIX = [(stage, number) for stage in (*ORDER, RUNNING) for number in CODES]
SHARE = list(zip(random.Random(3).sample((*ORDER, RUNNING), len(CODES)), CODES, strict=True))
"""Every signal once, each at another stage."""


@pytest.fixture
def run_folder():
    """Shorter than pytest's own: the paths of Unix sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        yield Path(folder)


@pytest.fixture
def shard_set(tiny_checkpoint, sharded):
    return sharded(tiny_checkpoint("long32k"), 2)


@pytest.fixture
def one_rank(tiny_checkpoint, sharded):
    """For what the front does alone: a second rank takes as long to start as the first."""
    return sharded(tiny_checkpoint("long32k"), 1)


def signal_at_stage(stage: str, number: int, folder: Path, shard_set: str, monkeypatch) -> None:
    """Hold the ranks in a stage, send the front a signal, and see that nothing is left."""
    process = start_faulty(f"1:{stage}:hang", folder, "generate", shard_set, *GENERATE, "--max-tokens", "100")
    try:
        wait_for_ranks(folder, 2)
        if stage != SPAWN:
            wait_for(lambda: _stage_of_rank_1(folder) == stage or None, 60, process)
        begin = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == CODES[signal.Signals(number)], err
    assert "Traceback" not in err
    wait_for(lambda: None if rank_pids(folder) else True, END_SECONDS)
    assert time.monotonic() - begin < END_SECONDS
    if number == signal.SIGKILL:  # its folder could not be removed: the next run does
        monkeypatch.setattr(run_folder_module, "_base", lambda: folder)
        run_folder_module.remove_stale()
    assert_nothing_left(folder)


def _stage_of_rank_1(folder: Path) -> str | None:
    return next((p.read_text() for p in folder.glob("mgtp-*/stage-1")), None)


@pytest.mark.parametrize(("stage", "number"), SHARE)
def test_signals_to_the_front(stage, number, run_folder, shard_set, monkeypatch):
    signal_at_stage(stage, number, run_folder, shard_set, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "number"), MATRIX)
def test_every_signal_at_every_stage(stage, number, run_folder, shard_set, monkeypatch):
    signal_at_stage(stage, number, run_folder, shard_set, monkeypatch)


def test_a_front_that_was_suspended_goes_on(run_folder, one_rank):
    """Ctrl-Z for longer than a step may take: that time does not count."""
    options = (*GENERATE, "--max-tokens", "500", "--step-timeout", "3")
    run = start(run_folder, "generate", one_rank, *options)
    assert run.stdout is not None
    assert run.stdout.read(1)
    run.send_signal(signal.SIGSTOP)
    time.sleep(4)
    run.send_signal(signal.SIGCONT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert len(out) > 250
    assert_nothing_left(run_folder)


def test_nohup(run_folder, one_rank):
    """A signal that was ignored when the program began stays ignored."""
    command = [sys.executable, "-m", "mgtp.cli", "generate", one_rank, *GENERATE, "--max-tokens", "100"]
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command]
    run = subprocess.Popen(shell, env=environment(run_folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.read(1)
    run.send_signal(signal.SIGHUP)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err


def test_a_reader_that_stops(run_folder, one_rank):
    """Nothing can be written any more; a signal ends the run all the same."""
    ours, theirs = _nearly_full_pipe()
    command = [sys.executable, "-m", "mgtp.cli", "generate", one_rank, *GENERATE, "--max-tokens", "30000"]
    run = subprocess.Popen(command, env=environment(run_folder), stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    wait_for(lambda: _is_full(ours, 4050) or None, 60)
    run.send_signal(signal.SIGTERM)
    assert run.wait(END_SECONDS) == 143
    os.close(ours)
    run.communicate()
    assert_nothing_left(run_folder)


@pytest.mark.parametrize(
    ("fault", "code"), [pytest.param("SIGTERM to the front", 0, marks=pytest.mark.soak), ("SIGKILL to a rank", 5)]
)
def test_a_reader_of_the_log_that_stops(fault, code, run_folder, shard_set):
    """The server goes on answering, and ends in time: neither its log nor its last words are waited for."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "mgtp.cli", "serve", shard_set, "--device", "cpu", "--port", "0"]
    server = subprocess.Popen(command, env=environment(run_folder), stdout=theirs, stderr=theirs)
    os.close(theirs)
    with server, os.fdopen(ours) as log:
        try:
            url = next(line.split()[-1] for line in log if "listening on " in line)
            assert any("ready in" in line for line in log)
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
                while not _is_full(ours):
                    assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
                for _ in range(100):
                    assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
                assert http.get("/health").status_code == 200
                assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}).status_code == 200
            begin = time.monotonic()
            if code:
                os.kill(rank_pids(run_folder)[0], signal.SIGKILL)
            else:
                server.terminate()
            assert server.wait(END_SECONDS) == code
            print(f"{fault}: ended after {time.monotonic() - begin:.1f} s")
        finally:
            server.kill()
    assert_nothing_left(run_folder)


def test_a_reader_of_everything_that_stops(run_folder, one_rank):
    """As in `mgtp generate ... 2>&1 | sleep`: the error line has no reader either."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.write(theirs, b"." * 3200)  # so that it is soon full
    command = [sys.executable, "-m", "mgtp.cli", "generate", one_rank, *GENERATE, "--max-tokens", "30000"]
    run = subprocess.Popen(command, env=environment(run_folder), stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        wait_for(lambda: _is_full(ours) or None, 60)
        run.terminate()
        assert run.wait(END_SECONDS) == 143
    finally:
        run.kill()
        os.close(ours)
    assert_nothing_left(run_folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
def test_a_rank_that_fails_while_the_reader_of_stdout_has_stopped(number, run_folder, shard_set):
    """It is noticed and said all the same."""
    ours, theirs = _nearly_full_pipe()
    command = [sys.executable, "-m", "mgtp.cli", "generate", shard_set, *GENERATE, "--max-tokens", "30000"]
    run = subprocess.Popen(command, env=environment(run_folder), stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    try:
        wait_for(lambda: _is_full(ours, 4050) or None, 60)
        _wait_until_nothing_comes(ours)
        os.kill(rank_pid(run_folder, 1), number)
        _, err = run.communicate(timeout=END_SECONDS)
    finally:
        run.kill()
        os.close(ours)
    assert run.returncode == 5, err
    assert f"error: rank 1 {'was killed' if number == signal.SIGKILL else 'is stopped'}" in err
    assert_nothing_left(run_folder)


@pytest.mark.parametrize("fault", [pytest.param("none", marks=pytest.mark.soak), "a rank is killed"])
def test_a_batch_while_the_reader_of_stderr_has_stopped(fault, run_folder, shard_set):
    """From the very start: the work is done all the same, and it ends when a rank does."""
    ours, theirs = _nearly_full_pipe(4096)
    limit = 5 if fault == "none" else 30000
    request = {"prompt": "x", "max_tokens": limit, "ignore_eos": True}
    (run_folder / "in.jsonl").write_text(json.dumps(request) + "\n")
    files = ("--prompts", str(run_folder / "in.jsonl"), "--output", str(run_folder / "out.jsonl"))
    command = [sys.executable, "-m", "mgtp.cli", "--debug", "generate", shard_set, *files, "--device", "cpu"]
    run = subprocess.Popen(command, env=environment(run_folder), stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    try:
        if fault != "none":
            wait_for_ranks(run_folder, 2)
            wait_for(lambda: _stage_of_rank_1(run_folder) == RUNNING or None, 60)
            os.kill(rank_pid(run_folder, 1), signal.SIGKILL)
        assert run.wait(60 if fault == "none" else END_SECONDS) == (0 if fault == "none" else 5)
    finally:
        run.kill()
        os.close(ours)
    assert_nothing_left(run_folder)
    assert len((run_folder / "out.jsonl").read_text().splitlines()) == (fault == "none")


def test_a_terminal_that_was_stopped(run_folder, shard_set):
    """With Ctrl-S, while the line of the stages is live: the ranks start all the same, and the loss of one ends it."""
    terminal, theirs = os.openpty()
    command = [sys.executable, "-m", "mgtp.cli", "generate", shard_set, *GENERATE, "--max-tokens", "30000"]
    env = environment(run_folder, TERM="xterm")
    run = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        wait_for_ranks(run_folder, 2)
        os.write(terminal, b"\x13")
        wait_for(lambda: _stage_of_rank_1(run_folder) == RUNNING or None, 60)
        os.kill(rank_pid(run_folder, 1), signal.SIGKILL)
        assert run.wait(END_SECONDS) == 5
    finally:
        run.kill()
        os.close(theirs)
        os.close(terminal)
    assert_nothing_left(run_folder)


def _wait_until_nothing_comes(fd: int) -> None:
    before = -1
    while (now := _num_bytes(fd)) != before:
        before = now
        time.sleep(0.5)


def _nearly_full_pipe(written: int = 4000) -> tuple[int, int]:
    """The ends (to read, to write) of a pipe that holds 4096 bytes."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.write(theirs, b"." * written)
    return ours, theirs


@pytest.mark.parametrize("how", ["gone", "full", "closed"])
def test_an_error_that_nobody_can_be_told(how, tmp_path):
    """The exit code says it all the same, and stdout has results only."""
    redirection = {"gone": "2> >(true)", "full": "2>/dev/full", "closed": "2>&-"}[how]
    script = f"{sys.executable} -m mgtp.cli verify {tmp_path}/nowhere {redirection}"
    run = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, timeout=60)
    assert (run.returncode, run.stdout) == (3, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(closed, run_folder, one_rank):
    """What nobody wants to read does not make a run fail, nor come to lie in a file of ours."""
    script = f"{sys.executable} -m mgtp.cli generate {one_rank} {' '.join(GENERATE)} --max-tokens 3 {closed}"
    run = subprocess.run(["bash", "-c", script], env=environment(run_folder), capture_output=True, timeout=60)
    assert (run.returncode, bool(run.stdout)) == (0, ">&-" not in closed.split())
    assert_nothing_left(run_folder)


def _is_full(fd: int, num_bytes: int = 3500) -> bool:
    """Of 4096, or nearly: lines of a log are written as a whole or not at all."""
    return _num_bytes(fd) > num_bytes


def _num_bytes(fd: int) -> int:
    """What waits in a pipe."""
    import array
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_full_disks(run_folder, one_rank):
    """A log that cannot be written harms nothing; a result that cannot is an error of one line."""
    command = [sys.executable, "-m", "mgtp.cli", "generate", one_rank, *GENERATE, "--max-tokens", "5"]
    with open("/dev/full", "w") as full:
        for out, err in ((subprocess.PIPE, full), (full, subprocess.PIPE)):
            buffered = {**environment(run_folder), "PYTHONUNBUFFERED": ""}
            run = subprocess.run(command, env=buffered, stdout=out, stderr=err, text=True, timeout=120)
            if out is subprocess.PIPE:
                assert run.returncode == 0 and run.stdout
            else:
                assert run.returncode == 1
                assert run.stderr.splitlines()[-2] == "error: standard output: No space left on device"
    assert_nothing_left(run_folder)


def unshare(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script with mounts of its own; skips where that is not permitted."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounts of one's own are not permitted here")
    command = ["unshare", "-m", "sh", "-ec", script]
    return subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=120)


def test_shared_memory_too_small(run_folder, shard_set):
    """Ranks on the CPU need none."""
    arguments = f"generate {shard_set} {' '.join(GENERATE)} --max-tokens 5"
    run = unshare(f"mount -t tmpfs -o size=4k x /dev/shm; {sys.executable} -m mgtp.cli {arguments}", run_folder)
    assert run.returncode == 0, run.stderr


def test_no_room_for_the_run_folder(run_folder, shard_set):
    arguments = f"generate {shard_set} {' '.join(GENERATE)} --max-tokens 5"
    mount = "mount -t tmpfs -o size=4k,nr_inodes=1 x /mnt"
    run = unshare(f"{mount}; XDG_RUNTIME_DIR=/mnt {sys.executable} -m mgtp.cli {arguments}", run_folder)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-2:] == [
        "error: /mnt: No space left on device",
        "hint: make room there, or let XDG_RUNTIME_DIR or TMPDIR name another folder",
    ]


def test_waiting_is_by_the_monotonic_clock():
    """A clock that is set must not end or prolong a wait; wall-clock time goes into documents and ages of files."""
    root = Path(run_folder_module.__file__).resolve().parents[2]
    files = [p for part in ("cli", "runtime") for p in (root / part).rglob("*.py") if p.name != "cache.py"]
    assert not [p for p in files if "time.time()" in p.read_text().replace("int(time.time())", "")]


def test_a_second_run_is_not_disturbed_by_the_death_of_a_first(run_folder, shard_set):
    first = start(run_folder, "generate", shard_set, *GENERATE, "--max-tokens", "30000")
    wait_for_ranks(run_folder, 2)
    first.kill()
    first.communicate()
    mgtp(run_folder, "generate", shard_set, *GENERATE, "--max-tokens", "5")


LOSING = """
import os, signal, time
from mgtp.cli import app
app.END_SECONDS = 0.2
app._handle_signals()
try:
    os.kill(os.getpid(), {number})
except BaseException:
    pass  # as C code that clears errors does
try:
    time.sleep(60)
except {error}:
    print("ended")
"""


@pytest.mark.parametrize(("number", "error"), [(2, "KeyboardInterrupt"), (15, "app.Terminated")])
def test_a_signal_whose_exception_is_lost_ends_the_program_all_the_same(number, error, tmp_path):
    script = LOSING.format(number=number, error=error)
    run = subprocess.run([sys.executable, "-c", script], env=environment(tmp_path), capture_output=True, text=True)
    assert run.stdout == "ended\n", run.stderr
