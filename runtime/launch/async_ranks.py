"""A group of ranks as an event loop sees it: the same words and first causes as `RankGroup.receive`, without waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq

from ...shardplan.errors import RankError
from ...shardplan.shard_set import ShardSet
from ..messages import Failed, FrontMessage, RankMessage
from .first_cause import Inquest
from .group import POLL_MS, RankGroup
from .patience import Patience
from .start import LaunchOptions, StartedGroup, StartUp, spawn_ranks, start_limits


class AsyncRanks:
    """Sends to the leader and receives from every rank. `failing` is set as soon as a failure has been noticed."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.failing = False
        self._readable = asyncio.Event()
        # Not zmq.asyncio: it would make a second socket object of the same socket, and each would close it.
        self._fd = int(group.events.FD)
        asyncio.get_running_loop().add_reader(self._fd, self._readable.set)

    def send(self, message: FrontMessage) -> None:
        """Send a message to the leader."""
        self.group.send(message)

    async def receive(self, timeout: float | Patience | None = None) -> RankMessage | None:
        """The next message from any rank, or None after `timeout` seconds. Raises RankError when a rank has failed."""
        patience = timeout if isinstance(timeout, Patience) else Patience(timeout)
        while True:
            message = await self._poll()
            if isinstance(message, Failed) or (message is None and self._has_exited()):
                raise await self._first_cause(message)
            if message is not None:
                return message
            if patience.is_over:
                return None

    async def _poll(self) -> RankMessage | None:
        """The next message, None when there is none for a moment."""
        self._readable.clear()  # it tells of changes only: looking comes after
        message = self._take()
        if message is None:
            # Not wait_for: in Python 3.11 it can swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_MS / 1000):
                    await self._readable.wait()
            message = self._take()
        return message

    def _take(self) -> RankMessage | None:
        """A message that is there."""
        try:
            return self.group.decode(self.group.events.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _has_exited(self) -> bool:
        try:
            return self.group.has_exited()
        except RankError:
            self.failing = True
            raise

    async def _first_cause(self, message: Failed | None) -> RankError:
        """The first cause, once every rank has had the time to say its own."""
        self.failing = True
        inquest = Inquest(self.group.ranks, [message] if message is not None else [])
        while not inquest.is_closed:
            inquest.add(await self._poll())
        return self.group.note(inquest.verdict())

    async def stalled_step(self) -> RankError:
        """The error for a step that does not end."""
        self.failing = True
        return await asyncio.to_thread(self.group.stalled_step)

    @property
    def suspicion(self) -> str:
        """What can be seen at once of a failure whose cause is still being looked for; empty when that is nothing."""
        fallen = [str(entry.rank) for entry in self.group.local if entry.has_failed]
        return f"rank {', '.join(fallen)} has ended or is suspended" if fallen else ""

    def close(self) -> None:
        """Stop receiving, and leave the event loop; the group can then be stopped in another thread."""
        asyncio.get_running_loop().remove_reader(self._fd)


async def start_ranks(
    shard_set: ShardSet, options: LaunchOptions, on_stage: Callable[[int, str], None] | None = None
) -> tuple[StartedGroup, AsyncRanks]:
    """`start.start_ranks` on an event loop. It runs in the main thread, with which the ranks end."""
    group = spawn_ranks(shard_set, options)
    ranks = AsyncRanks(group)
    start = StartUp(group, start_limits(shard_set, options.cluster), on_stage)
    try:
        while not start.done:
            start.note(await ranks.receive(start.patience))
    except BaseException:
        ranks.close()
        await asyncio.to_thread(group.stop)
        raise
    return start.result(), ranks
