"""One model and the ranks that serve it: started, watched, started again after a failure, ended."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ...shardplan.errors import CheckpointError, MgtpError, RankError
from ...shardplan.shard_set import ShardSet
from ...shardplan.values import counted
from ..launch.async_ranks import AsyncRanks, start_ranks
from ..launch.start import LaunchOptions, StartedGroup
from ..messages import Stats
from .engine_client import IDLE, EngineClient
from .errors import ApiError, Replaced, unavailable
from .metrics import ModelMetrics
from .model import ServedModel
from .options import ServerOptions
from .restarts import WINDOW_SECONDS, Restarts

log = logging.getLogger("mgtp.server")

OnStage = Callable[[int, str], None]

_SHORTEST_START_SECONDS = 1.0
"""What clients are told to wait beside the pause, until a start has been timed."""


class ModelHost:
    """A served model. `client` is there while its ranks are ready; `task` is what watches them, once they have been."""

    def __init__(self, model: ServedModel, options: ServerOptions, metrics: ModelMetrics) -> None:
        self.model, self.metrics = model, metrics
        self.restarts = Restarts(options.max_restarts)
        self.launch: LaunchOptions | None = None
        self.task: asyncio.Task[None] | None = None
        self._options = options
        self._client: EngineClient | None = None
        self._failure: MgtpError | None = None
        self._is_restarting = self._is_ending = self._is_retired = self._refuses = False
        self._generated_before = 0
        self._start_seconds = _SHORTEST_START_SECONDS
        self._next_start = 0.0

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return self.model.name

    @property
    def client(self) -> EngineClient:
        """The way to the leader; raises ApiError while there is none."""
        if self._client is None or self._client.failing or self._refuses:
            raise self._unavailable()
        return self._client

    def _unavailable(self) -> ApiError:
        """Why requests are not taken now, and when to come back."""
        trouble = self._client.trouble if self._client is not None else ""
        trouble = self._failure.message if self._failure is not None else trouble
        why = f": {trouble}" if trouble else ""
        if self._is_retired:
            return Replaced("the model is being replaced", math.ceil(self._start_seconds))
        if self.status == "restarting":
            left = max(0.0, self._next_start - time.monotonic()) + self._start_seconds
            return unavailable(f"the ranks are being started again{why}", math.ceil(left), code="restarting")
        if self.status == "failed":
            return unavailable(f"a rank has failed{why}", code="rank_failed")
        return unavailable("the model is being loaded", code="loading")

    @property
    def status(self) -> str:
        """'loading', 'ready', 'stalled', 'replacing', 'restarting' or 'failed'."""
        if self._is_retired:
            return "replacing"
        if self._failure is not None or (self._client is not None and self._client.failing):
            may_restart = not self._is_ending and self.restarts.allowed(time.monotonic())
            return "restarting" if self._is_restarting or may_restart else "failed"
        if self._client is None:
            return "loading"
        return "stalled" if self._client.is_stalled else "ready"

    @property
    def is_retired(self) -> bool:
        """Whether another model has, or gets, its place."""
        return self._is_retired

    @property
    def stats(self) -> Stats:
        """The leader's last report; zeros while there is none."""
        return self._client.stats if self._client is not None else IDLE

    @property
    def num_generated(self) -> int:
        """Tokens that leaders of this model have sent."""
        return self._generated_before + (self._client.num_generated if self._client is not None else 0)

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return self._client.num_unfinished if self._client is not None else 0

    async def start(self, launch: LaunchOptions, on_stage: OnStage | None = None) -> None:
        """Start the ranks; they serve when this returns. Raises MgtpError when they do not start."""
        self.launch = launch
        try:
            started, ranks = await start_ranks(self.model.shard_set, launch, on_stage)
        except MgtpError as error:
            self._failure, self._is_ending = error, True
            raise
        client = self._adopt(started, ranks)
        self.task = asyncio.create_task(self._watch(client, started, ranks, on_stage))

    async def stop(self) -> None:
        """End the ranks. Whoever still waits for an answer should have been told."""
        self._is_ending = self._refuses = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    def end(self) -> None:
        """From now on a failure is final: what runs may finish, and is not started again."""
        self._is_ending = True

    def retire(self, *, refuse: bool) -> None:
        """Another model takes this one's place: what runs may finish, and with `refuse` nothing more is taken."""
        self._is_ending = self._is_retired = True
        self._refuses = refuse
        if self._client is not None:
            self._client.is_retired = True
        self.metrics.forget_ranks()

    def publish(self) -> None:
        """Let metrics show the ranks."""
        self.metrics.observe_ready(self.model.ready)

    def fail_all(self, error: ApiError) -> None:
        """End every request with an error."""
        if self._client is not None:
            self._client.fail_all(error)

    def _adopt(self, started: StartedGroup, ranks: AsyncRanks) -> EngineClient:
        """Take ranks that are ready into service."""
        options = self._options
        client = EngineClient(ranks, self.metrics, max_num_seqs=options.max_num_seqs, max_queue=options.max_queue)
        self.model.ready, self._start_seconds = started.ready, started.seconds
        self._client, self._failure, self._is_restarting = client, None, False
        # What start-up made stays: looking through it for garbage would hold all streams up now and then.
        gc.collect()
        gc.freeze()
        tokens = started.ready[0].kv_cache_tokens
        num_ranks = counted(len(started.ready), "rank")
        log.info("%s ready in %.1f s, KV cache for %d tokens", num_ranks, started.seconds, tokens)
        return client

    async def _watch(
        self, client: EngineClient, started: StartedGroup, ranks: AsyncRanks, on_stage: OnStage | None
    ) -> None:
        """Serve until cancelled; raises MgtpError when ranks fail and may not, or do not, start again."""
        while True:
            await self._serve(client, started, ranks)
            started, ranks = await self._start_again(on_stage)
            client = self._adopt(started, ranks)
            self.publish()

    async def _serve(self, client: EngineClient, started: StartedGroup, ranks: AsyncRanks) -> None:
        """From ready ranks to failed ones, whose error is then `_failure`; they are gone when this returns."""
        try:
            await client.run()
        except RankError as error:
            self._failure = error
            if not self._is_retired:
                self.metrics.forget_ranks()
        finally:
            self._generated_before, self._client = self.num_generated, None
            ranks.close()
            await asyncio.to_thread(started.group.stop, orderly=self._failure is None)

    async def _start_again(self, on_stage: OnStage | None) -> tuple[StartedGroup, AsyncRanks]:
        """Ranks in the place of those that have failed; raises MgtpError when there may be none."""
        assert self.launch is not None
        while True:
            await self._pause()
            try:
                await asyncio.to_thread(_check_unchanged, self.model.shard_set)
                return await start_ranks(self.model.shard_set, self.launch, on_stage)
            except MgtpError as error:
                self._failure, self._is_restarting = error, False

    async def _pause(self) -> None:
        """Wait for the next start; raises when there may be none."""
        assert self._failure is not None
        now = time.monotonic()
        if self._is_ending or not self.restarts.limit:
            raise self._failure
        if not self.restarts.allowed(now):
            again = (
                f"{self._failure.message}, after {counted(self.restarts.limit, 'restart')} within {WINDOW_SECONDS:g} s"
            )
            raise RankError(again, self._failure.hint)
        pause, self._is_restarting = self.restarts.note(now), True
        self.metrics.restarts.inc()
        self._next_start = now + pause
        log.warning("%s; %s starts again in %g s", self._failure.message, self.name, pause)
        await asyncio.sleep(pause)

    def look_at_ranks(self) -> list[dict[str, Any]]:
        """What ranks are and hold, as far as known; the next look finds it up to date."""
        client = self._client
        if client is not None:
            client.ask_memory()
        known = client.memory if client is not None else {}
        ready = [msgspec.structs.asdict(rank) for rank in self.model.ready]
        return [{**r, **(msgspec.structs.asdict(known[r["rank"]]) if r["rank"] in known else {})} for r in ready]


def _check_unchanged(shard_set: ShardSet) -> None:
    """Raise CheckpointError unless the folder still holds the set that was opened: its tokenizer is in use here."""
    if shard_set.has_weights and ShardSet.open(shard_set.path).plan != shard_set.plan:
        raise CheckpointError(
            f"{shard_set.path}: not the shard set that was loaded", "put it back, or start the server anew"
        )
