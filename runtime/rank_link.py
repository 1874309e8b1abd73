"""A rank's sockets: to the front, and between leader and followers. No torch, so that it works from the first moment."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from ..shardplan.errors import MgtpError, RankError
from . import secure_sockets
from .messages import Failed, FrontMessage, RankMessage, Stage, StepMessage
from .options import RankOptions
from .stages import SPAWN, stage_file

SECRET_VARIABLE = "MGTP_CLUSTER_SECRET"
GREETING_SECONDS = 30

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass
class RankLink:
    """Messages of one rank. The leader receives from the front and sends steps; followers receive steps."""

    rank: int
    options: RankOptions
    folder: Path
    current_stage: str = SPAWN

    def __post_init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.PUSH)
        self._front.connect(f"ipc://{self.folder}/front")

    def open(self) -> None:
        """Meet the front's requests and the other ranks. From here on, and here, a failure can be reported."""
        self._decoder = msgspec.msgpack.Decoder(FrontMessage if self.rank == 0 else StepMessage)
        self._followers: list[bytes] = []
        if self.rank == 0:
            self._incoming = self._context.socket(zmq.PULL)
            self._incoming.bind(f"ipc://{self.folder}/leader")
            self._open_steps()
        else:
            self._incoming = self._context.socket(zmq.DEALER)
            self._incoming.setsockopt(zmq.IDENTITY, _identity(self.rank))
            self._attach(secure_sockets.connect, self._incoming)
            self._incoming.send(b"")  # whom the leader has not heard of it cannot reach

    def _open_steps(self) -> None:
        """Leader: the socket from which followers get their steps."""
        self._steps = self._context.socket(zmq.ROUTER)
        self._steps.setsockopt(
            zmq.SNDHWM, 0
        )  # a router drops what it may not keep; collectives bound what is under way
        self._attach(secure_sockets.listen, self._steps)

    def _attach(self, securely: Callable[[zmq.Socket, str, str], None], socket: zmq.Socket) -> None:
        """Bind (leader) or connect the socket for steps: within the run's folder, or encrypted between nodes."""
        if self.options.steps:
            securely(socket, self.options.steps, os.environ[SECRET_VARIABLE])
        elif self.rank == 0:
            socket.bind(f"ipc://{self.folder}/steps")
        else:
            socket.connect(f"ipc://{self.folder}/steps")

    @classmethod
    def from_environment(cls) -> RankLink:
        """The link that the front's environment describes."""
        folder = Path(os.environ["MGTP_RUN_FOLDER"])
        options = msgspec.json.decode((folder / "options.json").read_bytes(), type=RankOptions)
        return cls(int(os.environ["RANK"]), options, folder)

    def send(self, message: RankMessage) -> None:
        """Tell the front."""
        self._front.send(self._encoder.encode(message))

    def stage(self, name: str) -> None:
        """Tell the front which stage of start-up begins."""
        self.enter(name)
        self.send(Stage(self.rank, name))

    def enter(self, name: str) -> None:
        """Leave word of the stage for the front to find, should this rank end all of a sudden."""
        self.current_stage = name
        stage_file(self.folder, self.rank).write_text(name)

    def send_step(self, message: StepMessage) -> None:
        """Leader: tell every follower."""
        if self.options.num_ranks == 1:
            return
        content = self._encoder.encode(message)
        for follower in self._followers or self._meet_followers():
            self._steps.send_multipart((follower, content))

    def _meet_followers(self) -> list[bytes]:
        """Wait for the greeting of every follower. They are all running, so it is there or on its way."""
        expected = {_identity(rank) for rank in range(1, self.options.num_ranks)}
        seen: set[bytes] = set()
        while seen < expected:
            if not self._steps.poll(GREETING_SECONDS * 1000):
                missing = min(int.from_bytes(i[1:], "big") for i in expected - seen)
                raise RankError(f"rank {missing} does not take steps", "check the network between the nodes")
            seen.add(self._steps.recv_multipart()[0])
        self._followers = sorted(expected)
        return self._followers

    def receive(self, timeout: float | None = None) -> FrontMessage | StepMessage | None:
        """The next message, or None after `timeout` seconds (None: wait for ever, the front ends a rank it gives up)."""
        if self._incoming.poll(None if timeout is None else int(timeout * 1000)):
            return self._decoder.decode(self._incoming.recv())
        return None

    def report(self, error: BaseException) -> None:
        """Tell the front why this rank ends."""
        if self.options.log_level == "debug":
            traceback.print_exception(error)
        ours = isinstance(error, MgtpError)
        message = error.message if ours else f"{type(error).__name__}: {error}".rstrip(": ") + _place(error)
        self.send(
            Failed(
                rank=self.rank,
                stage=self.current_stage,
                message=" ".join(message.split()),
                hint=error.hint if ours else "run again with --debug for the traceback",
                exit_code=error.exit_code if ours else 5,
                collective=is_collective(error),
            )
        )
        self.close()

    def close(self) -> None:
        """Flush what was said, for a second at most, and close."""
        self._context.destroy(linger=1000)


def _identity(rank: int) -> bytes:
    """How a follower's socket is called. (A first byte of zero is ZeroMQ's own.)"""
    return b"r" + rank.to_bytes(4, "big")


def is_collective(error: BaseException) -> bool:
    """Whether an error comes out of a collective, so that another rank may be its cause."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    if "cuda error" in text:  # of this rank's own device, also as NCCL's "unhandled cuda error"
        return False
    return "DistError" in kinds or any(word in text for word in ("gloo", "nccl", "connection closed by peer"))


def _place(error: BaseException) -> str:
    """' (FILE:LINE)' of the innermost frame of ours that an unexpected error went through."""
    frames = [(Path(f.filename).resolve(), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    ours = [(path.relative_to(_PACKAGE), line) for path, line in frames if path.is_relative_to(_PACKAGE)]
    return f" ({ours[-1][0]}:{ours[-1][1]})" if ours else ""
