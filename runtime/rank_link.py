"""A rank's sockets: to the front, and between leader and followers. No torch, so that it works from the first moment."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from ..shardplan.errors import MgtpError
from .messages import Failed, FrontMessage, RankMessage, Stage, StepMessage
from .options import RankOptions
from .stages import SPAWN, stage_file

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
        self._incoming = self._context.socket(zmq.PULL)
        self._decoder = msgspec.msgpack.Decoder(FrontMessage if self.rank == 0 else StepMessage)
        self._incoming.bind(f"ipc://{self.folder}/{'leader' if self.rank == 0 else f'follower-{self.rank}'}")
        self._followers = []
        for rank in range(1, self.options.tp_size) if self.rank == 0 else ():
            socket = self._context.socket(zmq.PUSH)
            socket.connect(f"ipc://{self.folder}/follower-{rank}")
            self._followers.append(socket)

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
        if self._followers:
            content = self._encoder.encode(message)
            for socket in self._followers:
                socket.send(content)

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
        message = error.message if ours else f"{type(error).__name__}: {error}".strip() + _place(error)
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


def is_collective(error: BaseException) -> bool:
    """Whether an error comes out of a collective, so that another rank may be its cause."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return "DistError" in kinds or any(word in text for word in ("gloo", "nccl", "connection closed by peer"))


def _place(error: BaseException) -> str:
    """' (FILE:LINE)' of the innermost frame of ours that an unexpected error went through."""
    frames = [(Path(f.filename).resolve(), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    ours = [(path.relative_to(_PACKAGE), line) for path, line in frames if path.is_relative_to(_PACKAGE)]
    return f" ({ours[-1][0]}:{ours[-1][1]})" if ours else ""
