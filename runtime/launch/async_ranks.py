"""A group of ranks as an event loop sees it: the same words and first causes as `RankGroup.receive`, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq.asyncio

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
        self._events = zmq.asyncio.Socket.from_socket(group.events)
        self._next: asyncio.Future[bytes] | None = None

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
        """The next message, None when there is none for a moment; one that comes later is not lost."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._events.recv())
        await asyncio.wait((self._next,), timeout=POLL_MS / 1000)
        if not self._next.done():
            return None
        content, self._next = self._next.result(), None
        return self.group.decode(content)

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

    def close(self) -> None:
        """Stop receiving, and leave the event loop; the group can then be stopped in another thread."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._events.close()


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
