"""Starting one process per rank, watching them, and stopping them: nothing outlives the front."""

from __future__ import annotations

import collections
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import zmq

from ...shardplan.errors import RankError
from ..messages import Failed, FrontMessage, RankMessage
from ..options import RankOptions
from .run_folder import create_run_folder, remove_run_folder

log = logging.getLogger("mgtp.launch")

RANK_MODULE = "mgtp.runtime.rank"
POLL_MS = 50
FIRST_CAUSE_SECONDS = 0.5
"""How long to wait for other ranks' words once one has failed: the cause may be elsewhere."""

STDERR_LINES = 20


@dataclass
class RankProcess:
    """One rank's process, with the end of what it wrote to stderr."""

    rank: int
    process: subprocess.Popen[bytes]
    stage: str = "spawn"
    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=STDERR_LINES))

    def collect(self, stream: IO[bytes]) -> None:
        """Keep the last lines of stderr; runs in a thread until the rank closes it."""
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            log.debug("rank %d: %s", self.rank, line)


class RankGroup:
    """The ranks of one run. Use as a context manager: leaving it stops every process and removes the folder."""

    def __init__(self, options: RankOptions, rank_module: str = RANK_MODULE) -> None:
        self.options = options
        self.folder = create_run_folder()
        self.ranks: list[RankProcess] = []
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RankMessage)
        self._context = zmq.Context()
        try:
            self.events = self._context.socket(zmq.PULL)
            self.events.bind(f"ipc://{self.folder}/front")
            self._requests = self._context.socket(zmq.PUSH)
            self._requests.setsockopt(zmq.LINGER, 0)
            self._requests.setsockopt(zmq.SNDHWM, 0)  # sending never waits: who sends bounds what is under way
            self._requests.connect(f"ipc://{self.folder}/leader")
            self._alive, self._lifeline = os.pipe()
            self._spawn(rank_module)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _spawn(self, rank_module: str) -> None:
        """Start every rank with torchrun's environment. Runs in the calling thread, which must live on: the ranks'
        parent-death signal fires when the thread that spawned them ends."""
        (self.folder / "options.json").write_bytes(msgspec.json.encode(self.options))
        for rank in range(self.options.tp_size):
            process = subprocess.Popen(
                [sys.executable, "-m", rank_module],
                env=self._environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[self._alive],
                start_new_session=True,  # Ctrl-C reaches the front alone, which then stops the ranks
            )
            entry = RankProcess(rank, process)
            self.ranks.append(entry)
            assert process.stderr is not None
            threading.Thread(target=entry.collect, args=[process.stderr], daemon=True).start()

    def _environment(self, rank: int) -> dict[str, str]:
        threads = max(1, _num_cores() // self.options.tp_size)
        loopback = "lo" if sys.platform == "linux" else "lo0"
        defaults = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": str(threads)}
        # Steps of ever new sizes would break up the little memory that the KV cache leaves.
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        world = str(self.options.tp_size)
        contract = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        ours = {"MGTP_RUN_FOLDER": str(self.folder), "MGTP_LIFELINE": str(self._alive), "MGTP_FRONT": str(os.getpid())}
        return {**defaults, **os.environ, **contract, **ours}

    def send(self, message: FrontMessage) -> None:
        """Send a message to the leader."""
        self._requests.send(self._encoder.encode(message))

    def receive(self, timeout: float | None = None) -> RankMessage | None:
        """The next message from any rank, or None after `timeout` seconds. Raises RankError when a rank has failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.events.poll(POLL_MS):
                message = self.decode(self.events.recv())
                if isinstance(message, Failed):
                    raise self.blame([message, *self._further_failures()])
                return message
            if self.has_exited():
                raise self.blame(self._further_failures())
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def decode(self, content: bytes) -> RankMessage:
        """A message as it came from the socket `events`."""
        return self._decoder.decode(content)

    def has_exited(self) -> bool:
        """Whether a rank has ended; raises RankError for one that stands still."""
        if any(entry.process.poll() is not None for entry in self.ranks):
            return True
        for entry in self.ranks:
            if _is_stopped(entry.process.pid):
                raise RankError(
                    f"rank {entry.rank} is stopped (SIGSTOP) in stage {entry.stage!r}", "do not suspend ranks"
                )
        return False

    def _further_failures(self) -> list[Failed]:
        """What ranks say while the cause of a failure is still open."""
        failures, deadline = [], time.monotonic() + FIRST_CAUSE_SECONDS
        while time.monotonic() < deadline:
            if self.events.poll(POLL_MS):
                message = self.decode(self.events.recv())
                if isinstance(message, Failed):
                    failures.append(message)
        return failures

    def blame(self, failures: list[Failed]) -> RankError:
        """The error of the rank that failed first: its own words, or the end of its stderr. Others only follow it."""
        exited = [e for e in self.ranks if e.process.poll() is not None]
        spoke = {f.rank for f in failures}
        silent = [e for e in exited if e.rank not in spoke]
        own = [f for f in failures if not f.collective]
        if own:
            return _own_error(own[0])
        if silent:
            return self._silent_error(silent[0])
        return _own_error(failures[0])

    def _silent_error(self, entry: RankProcess) -> RankError:
        code = entry.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        last = f": {entry.tail[-1]}" if entry.tail else ""
        for line in entry.tail:
            log.info("rank %d: %s", entry.rank, line)
        hint = (
            "the kernel may have run out of memory: see dmesg"
            if code == -signal.SIGKILL
            else "its last lines are above"
        )
        return RankError(f"rank {entry.rank} {how} in stage {entry.stage!r}{last}", hint)

    def stop(self, grace: float = 5.0) -> None:
        """End every rank (SIGTERM, then SIGKILL after `grace` seconds if they linger) and remove the folder."""
        self._signal_all(signal.SIGKILL if self._failed() else signal.SIGTERM)
        deadline = time.monotonic() + grace
        for entry in self.ranks:
            try:
                entry.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal_all(signal.SIGKILL)
                entry.process.wait()
        for fd in (getattr(self, "_alive", -1), getattr(self, "_lifeline", -1)):
            if fd >= 0:
                os.close(fd)
        self._alive = self._lifeline = -1
        self._context.destroy(linger=0)
        remove_run_folder(self.folder)

    def wait(self, timeout: float) -> None:
        """Wait for every rank to end by itself, as after Stop; raises RankError when one ends badly or not at all."""
        deadline = time.monotonic() + timeout
        for entry in self.ranks:
            try:
                code = entry.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RankError(
                    f"rank {entry.rank} did not end within {timeout:g} s", "run again with --debug"
                ) from None
            if code:
                raise self._silent_error(entry)

    def _failed(self) -> bool:
        return any(e.process.poll() not in (None, 0) for e in self.ranks)

    def _signal_all(self, number: int) -> None:
        for entry in self.ranks:
            if entry.process.poll() is None:
                entry.process.send_signal(number)
                entry.process.send_signal(signal.SIGCONT)


def _num_cores() -> int:
    """Cores that this process may use; macOS has no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own_error(failure: Failed) -> RankError:
    error = RankError(f"rank {failure.rank} failed in stage {failure.stage!r}: {failure.message}", failure.hint)
    error.exit_code = failure.exit_code
    return error


def _is_stopped(pid: int) -> bool:
    """Whether a process is suspended (state T in /proc)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False
