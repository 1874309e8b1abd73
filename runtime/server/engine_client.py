"""The leader as HTTP requests see it: they submit sequences and get their tokens, each on its own ticket."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence

from ...shardplan.errors import RankError
from ..launch.async_ranks import AsyncRanks
from ..launch.patience import Patience
from ..messages import Abort, AskMemory, ClearCache, RankMemory, Request, RequestFailed, Stats, TokenOutput, Tokens
from .errors import ApiError, unavailable
from .metrics import ModelMetrics

log = logging.getLogger("mgtp.server")

STALL_SECONDS = 30.0
"""Work, but no word from the leader for this long: not ready for more."""

MEMORY_SECONDS = 2.0
"""How old what is known of the ranks' memory may get while somebody looks at it."""

IDLE = Stats(0, 0, 0, 0, 0, 0, 0, [], [])
"""What is known before the leader's first report."""


class Ticket:
    """The sequences of one HTTP request. Iterate over what has come, each time a list of (index, token); leave `close` to
    end what is unfinished."""

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._arrived: list[tuple[int, TokenOutput]] = []
        self._error: ApiError | None = None
        self._wake: asyncio.Future[None] | None = None

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> list[tuple[int, TokenOutput]]:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._index:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        arrived, self._arrived = self._arrived, []
        return arrived

    def put(self, output: TokenOutput) -> None:
        """A token from the leader."""
        self._arrived.append((self._index[output.id], output))
        if output.finish_reason is not None:
            self._forget(output.id)
        self._notify()

    def fail(self, error: ApiError) -> None:
        """End every sequence with an error, which comes after the tokens that are there."""
        self._error = self._error or error
        self.close()
        self._notify()

    def finish(self, index: int) -> None:
        """No more tokens are wanted of one sequence."""
        for request_id in [i for i, at in self._index.items() if at == index]:
            self._client.abort(request_id)
            self._forget(request_id)

    def close(self) -> None:
        """No more tokens are wanted."""
        for request_id in list(self._index):
            self._client.abort(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._index[request_id]
        self._client.forget(request_id)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class EngineClient:
    """Routes between tickets and the leader; `run` must be running."""

    def __init__(self, ranks: AsyncRanks, metrics: ModelMetrics, *, max_num_seqs: int, max_queue: int) -> None:
        self.ranks, self.metrics = ranks, metrics
        self.max_unfinished = max_num_seqs + max_queue
        self.stats = IDLE
        self.num_generated = 0
        self.memory: dict[int, RankMemory] = {}
        self.is_retired = False
        """Whether another model has taken over: its figures are shown now, not those of this one."""
        self.error: RankError | None = None
        self._tickets: dict[str, Ticket] = {}
        self._heard = time.monotonic()
        self._asked_memory = -math.inf
        self._patience = Patience(ranks.group.options.step_timeout)

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self._tickets)

    @property
    def failing(self) -> bool:
        """Whether a rank has failed."""
        return self.error is not None or self.ranks.failing

    @property
    def trouble(self) -> str:
        """What is known of the failure, in words; empty while there is none, or nothing is known."""
        return self.error.message if self.error is not None else self.ranks.suspicion if self.failing else ""

    @property
    def is_stalled(self) -> bool:
        """Whether there is work and nothing has been heard of it for too long."""
        return bool(self._tickets) and time.monotonic() - self._heard > STALL_SECONDS

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Send sequences to the leader, all or none; raises ApiError when there are too many."""
        if self.failing:
            raise unavailable(self.trouble or "a rank has failed", code="rank_failed")
        if len(requests) > self.max_unfinished:
            raise ApiError(400, f"{len(requests)} sequences at once, the server takes {self.max_unfinished}", param="n")
        if self.num_unfinished + len(requests) > self.max_unfinished:
            raise ApiError(
                429,
                f"{self.num_unfinished} sequences are running or waiting, the server takes {self.max_unfinished}",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        if not self._tickets:
            self._heard = time.monotonic()
            self._patience.restart()
        ticket = Ticket(self, requests)
        for request in requests:
            self._tickets[request.id] = ticket
            self.ranks.send(request)
        return ticket

    def abort(self, request_id: str) -> None:
        """Tell the leader that a sequence is not wanted any more."""
        if not self.failing:
            self.ranks.send(Abort(request_id))

    def clear_cache(self) -> None:
        """Make no prefix findable for the requests that come after this."""
        self.ranks.send(ClearCache())

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._tickets.pop(request_id, None)

    def fail_all(self, error: ApiError) -> None:
        """End every ticket with an error."""
        for ticket in set(self._tickets.values()):
            ticket.fail(error)

    def ask_memory(self) -> None:
        """Ask what every rank holds, unless that was done a moment ago; `memory` and the metrics have it soon."""
        now = time.monotonic()
        if not self.failing and now - self._asked_memory > MEMORY_SECONDS:
            self._asked_memory = now
            self.ranks.send(AskMemory())

    async def run(self) -> None:
        """Hand out what ranks say, until one fails: raises RankError after every ticket has been told."""
        try:
            while True:
                message = await self.ranks.receive(self._patience)
                self._patience.restart()
                if message is None and self._tickets:
                    raise await self.ranks.stalled_step()
                self._heard = time.monotonic()
                if isinstance(message, Tokens):
                    self.num_generated += len(message.outputs)
                    for output in message.outputs:
                        ticket = self._tickets.get(output.id)
                        if ticket is not None:
                            ticket.put(output)
                elif isinstance(message, RequestFailed):
                    ticket = self._tickets.get(message.id)
                    if ticket is not None:
                        ticket.fail(ApiError(500, message.message))
                elif isinstance(message, Stats):
                    self.stats = message
                    if not self.is_retired:
                        self.metrics.observe_stats(message)
                elif isinstance(message, RankMemory):
                    self.memory[message.rank] = message
                    if not self.is_retired:
                        self.metrics.observe_memory(message)
        except RankError as error:
            self.error = error
            self.fail_all(unavailable(error.message, code="rank_failed"))
            raise
