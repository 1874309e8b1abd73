"""Starting one process per rank, watching them, and stopping them: nothing outlives the front."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time

import msgspec
import zmq

from ...shardplan.errors import RankError
from ...shardplan.workers import signals_held
from ..messages import Failed, FrontMessage, RankMessage, Stop
from ..options import RankOptions
from ..stages import RUNNING
from ..threads import VARIABLE, share_of_cores
from .cluster import Cluster
from .first_cause import Inquest, Rank, stalled_error
from .node_server import NodeServer
from .patience import Patience
from .rank_process import RankProcess
from .remote_rank import RemoteRank
from .run_folder import create_run_folder, remove_run_folder

log = logging.getLogger("mgtp.launch")

RANK_MODULE = "mgtp.runtime.rank"
POLL_MS = 50
ORDERLY_SECONDS = 3.0
"""How long ranks may take to leave their process group together."""

END_SECONDS = 5.0
"""How long a killed process may take to end: one that hangs in the kernel does not."""


class RankGroup:
    """The ranks of one run. Use as a context manager: leaving it stops every process and removes the folder.

    With a `cluster` only this node's ranks are started here. On node 0 `ranks` are those of all nodes.
    """

    def __init__(self, options: RankOptions, rank_module: str = RANK_MODULE, cluster: Cluster | None = None) -> None:
        self.options, self._cluster = options, cluster
        self.local: list[RankProcess] = []
        self.failure = ""
        self._nodes: NodeServer | None = None
        self._remote: list[RemoteRank] = []
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RankMessage)
        self._alive = self._lifeline = -1
        self._here = cluster.ranks_of(cluster.node, options.num_ranks) if cluster else range(options.num_ranks)
        self.folder = create_run_folder()
        self._context = zmq.Context()
        try:
            self.events = self._context.socket(zmq.PULL)
            self.events.bind(f"ipc://{self.folder}/front")
            self._requests = self._context.socket(zmq.PUSH)
            self._requests.setsockopt(zmq.LINGER, 0)
            self._requests.setsockopt(zmq.SNDHWM, 0)  # sending never waits: who sends bounds what is under way
            self._requests.connect(f"ipc://{self.folder}/leader")
            self._alive, self._lifeline = os.pipe()
            if cluster is not None and cluster.node == 0:
                self._nodes = NodeServer(cluster, options, self.folder)
                self._remote = [RemoteRank(rank) for rank in range(self._here.stop, options.num_ranks)]
            self._spawn(rank_module)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop(orderly=kind is None)

    @property
    def ranks(self) -> list[Rank]:
        """Those that this process has to do with, in rank order."""
        if self._nodes is None:
            return [*self.local]
        return [*self.local, *self._remote]

    def _spawn(self, rank_module: str) -> None:
        """Start every rank with torchrun's environment. Runs in the calling thread, which must live on: the ranks'
        parent-death signal fires when the thread that spawned them ends."""
        (self.folder / "options.json").write_bytes(msgspec.json.encode(self.options))
        for rank in self._here:
            with signals_held():  # a process of which nobody knows could not be stopped
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", rank_module],  # the current folder's queue.py is not Python's
                    env=self._environment(rank),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=[self._alive],
                    start_new_session=True,  # Ctrl-C and Ctrl-Z reach the front alone
                )
                self.local.append(RankProcess(rank, process, self.folder))

    def _environment(self, rank: int) -> dict[str, str]:
        here, num_ranks = len(self._here), self.options.num_ranks
        loopback = "lo" if sys.platform == "linux" else "lo0"
        defaults = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        # Steps of ever new sizes would break up the little memory that the KV cache leaves.
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        # NVLink multicast can take a host's GPUs out of service when a program that uses it ends badly.
        defaults |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        if self.options.allow_shared_device:
            defaults["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        contract = {"RANK": str(rank), "LOCAL_RANK": str(rank - self._here.start), "WORLD_SIZE": str(num_ranks)}
        contract["LOCAL_WORLD_SIZE"] = str(here)
        contract[VARIABLE] = os.environ.get(VARIABLE) or str(share_of_cores(here))
        if self._cluster is not None:
            contract |= self._cluster.environment()
        ours = {"MGTP_RUN_FOLDER": str(self.folder), "MGTP_LIFELINE": str(self._alive), "MGTP_FRONT": str(os.getpid())}
        return {**defaults, **os.environ, **contract, **ours}

    def send(self, message: FrontMessage) -> None:
        """Send a message to the leader."""
        self._requests.send(self._encoder.encode(message))

    def receive(self, timeout: float | Patience | None = None) -> RankMessage | None:
        """The next message from any rank, or None after `timeout` seconds. Raises RankError when a rank has failed."""
        patience = timeout if isinstance(timeout, Patience) else Patience(timeout)
        while True:
            message = self.poll()
            if isinstance(message, Failed) or (message is None and self.has_exited()):
                raise self._first_cause(message)
            if message is not None:
                return message
            if patience.is_over:
                return None

    def receive_step(self) -> RankMessage:
        """The next message while there is work; raises RankError also when none comes within the time of a step."""
        message = self.receive(self.options.step_timeout)
        if message is None:
            raise self.stalled_step()
        return message

    def stalled_step(self) -> RankError:
        """The error for a step that does not end."""
        what = f"not finished a step within {self.options.step_timeout:g} s"
        return self.note(
            stalled_error(self.ranks, (f"has {what}", f"have {what}"), "allow more with --step-timeout, or ")
        )

    def note(self, error: RankError) -> RankError:
        """Remember why the run ends, for other nodes to hear."""
        self.failure = self.failure or error.message
        return error

    def poll(self) -> RankMessage | None:
        """The next message, None when there is none for a moment."""
        return self.decode(self.events.recv()) if self.events.poll(POLL_MS) else None

    def _first_cause(self, message: Failed | None) -> RankError:
        inquest = Inquest(self.ranks, [message] if message is not None else [])
        while not inquest.is_closed:
            inquest.add(self.poll())
        return self.note(inquest.verdict())

    def decode(self, content: bytes) -> RankMessage:
        """A message as it came from the socket `events`."""
        return self._decoder.decode(content)

    def has_exited(self) -> bool:
        """Whether a rank has ended; raises RankError for one that stands still."""
        if any(entry.has_exited for entry in self.local):
            return True
        for entry in self.local:
            if entry.is_stopped():
                what = f"rank {entry.rank} is stopped (SIGSTOP) in stage {entry.last_stage!r}"
                raise self.note(RankError(what, "do not suspend ranks"))
        return False

    def check(self) -> None:
        """Raise RankError when a rank has failed; for a front that for the moment takes no messages."""
        if self.has_exited():
            raise self._first_cause(None)

    def stop(self, *, orderly: bool = False) -> None:
        """End every rank and remove the folder. `orderly`: after success they first leave their process group together.

        Nothing is left also when this is interrupted.
        """
        try:
            if orderly and all(e.stage == RUNNING and not e.has_exited for e in self.ranks):
                self.send(Stop())
                self.end_by_themselves()
        finally:
            self._kill()
            if self._nodes is not None:
                self._nodes.stop("" if orderly else self.failure or "it was stopped while starting")
            for fd in (self._alive, self._lifeline):
                if fd >= 0:
                    os.close(fd)
            self._alive = self._lifeline = -1
            self._context.destroy(linger=0)
            remove_run_folder(self.folder)

    def end_by_themselves(self) -> None:
        """Give ranks that have been told to stop the time to do so."""
        for entry in self._wait(ORDERLY_SECONDS):
            log.info("rank %d does not end by itself within %g s: it is killed", entry.rank, ORDERLY_SECONDS)

    def _kill(self) -> None:
        for entry in self.local:
            if not entry.has_exited:
                entry.process.send_signal(signal.SIGKILL)
        for entry in self._wait(END_SECONDS):
            log.error("rank %d (process %d) does not end: it hangs in the kernel", entry.rank, entry.process.pid)

    def _wait(self, seconds: float) -> list[RankProcess]:
        """Wait until every rank here has ended; those that have not."""
        deadline = time.monotonic() + seconds
        for entry in self.local:
            try:
                entry.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        return [e for e in self.local if not e.has_exited]
