"""Loading, unloading and replacing models while the server runs: one change at a time, and each all or nothing.

A change prepares everything first: the set is opened as strictly as at start, and must fit. What requests see then
changes between two of them, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...shardplan.errors import CheckpointError, UsageError
from ...shardplan.shard_set import ShardSet
from ...shardplan.values import counted
from ..launch.device_memory import HOST, free_bytes, total_bytes
from ..launch.host_memory import host_free_bytes
from ..launch.room import check_room, has_full_room, launch_for, needs
from ..launch.start import LaunchOptions
from .errors import ApiError, unavailable, usage_error
from .host import ModelHost
from .model import check_name
from .models import Models

log = logging.getLogger("mgtp.server")

T = TypeVar("T")

_MAKE_ROOM = "unload another model first"


class Changes:
    """Changes what `models` serves. Every method raises ApiError or MgtpError when the change was not made."""

    def __init__(self, models: Models) -> None:
        self._models, self._options = models, models.options
        self._is_busy = False

    async def load(self, name: str, path: Path) -> ModelHost:
        """Serve another set beside those there are; after a failure nothing has changed."""
        return await self._exclusively(self._load(name, path))

    async def _load(self, name: str, path: Path) -> ModelHost:
        try:
            check_name(name)
        except UsageError as error:
            raise usage_error(error, "model") from None
        if name in self._models:
            raise ApiError(409, f"model {name[:100]!r} is served already: use /admin/replace", param="model")
        host = await self._open(name, path)
        launch = self._launch(host, self._models.devices())
        check_room(name, needs(host.model.shard_set, launch), free_bytes(launch.device), _MAKE_ROOM)
        await host.start(launch)
        self._models.take_in(host)
        log.info("serving %s from %s", name, path)
        return host

    async def unload(self, name: str) -> int:
        """Serve a model no more: what it is doing has the drain timeout to finish. How many sequences were cut."""
        return await self._exclusively(self._unload(name))

    async def _unload(self, name: str) -> int:
        host = self._models.find(name)
        self._models.drop(name)
        self._models.give_up_default(name)
        host.retire(refuse=True)
        num_cut = await self._models.see_off(host, self._options.drain_timeout, "the model was unloaded")
        log.info("unloaded %s", name)
        return num_cut

    async def replace(self, name: str | None, path: Path, *, in_place: bool) -> tuple[ModelHost, str]:
        """Serve another set under a name: 'beside' when the new ranks were started before the old ones ended.

        Otherwise, and always with `in_place`, the old ones end first ('in place'). After a failure beside, the old model
        serves; after one in place, no model has the name, and requests that name none are refused if it was the default.
        """
        return await self._exclusively(self._replace(name, path, in_place))

    async def _replace(self, name: str | None, path: Path, in_place: bool) -> tuple[ModelHost, str]:
        old = self._models.find(name)
        new = await self._open(old.name, path)
        launch = self._launch(new, self._models.devices())
        room = free_bytes(launch.device)
        how = "beside" if not in_place and has_full_room(needs(new.model.shard_set, launch), room) else "in place"
        if how == "beside":
            await self._replace_beside(old, new, launch)
        else:
            await self._replace_in_place(old, new)
        log.info("replaced %s by %s, %s", new.name, path, how)
        return new, how

    async def _replace_beside(self, old: ModelHost, new: ModelHost, launch: LaunchOptions) -> None:
        await new.start(launch)
        old.retire(refuse=False)
        self._models.take_in(new)
        # Nobody waits for the memory, and every request that is under way has a time limit of its own.
        leaving = self._models.see_off(old, self._options.request_timeout, "the model was replaced")
        self._models.in_background(leaving)

    async def _replace_in_place(self, old: ModelHost, new: ModelHost) -> None:
        launch = self._launch(new, self._models.devices(but=old))
        check_room(new.name, needs(new.model.shard_set, launch), self._room_without(old), _MAKE_ROOM)
        old.retire(refuse=True)
        await self._models.see_off(old, self._options.drain_timeout, "the model was replaced")
        try:
            await new.start(launch)
        except BaseException:
            self._models.drop(old.name)
            raise
        self._models.take_in(new)

    def clear_cache(self, name: str | None) -> list[str]:
        """Forget the prefixes of one model, or of all; the names."""
        hosts = list(self._models) if name is None else [self._models.find(name)]
        for client in [host.client for host in hosts]:
            client.clear_cache()
        return [host.name for host in hosts]

    async def _exclusively(self, change: Coroutine[Any, Any, T]) -> T:
        """The result of a change, unless there is another. It goes on when its client leaves, not when the server ends."""
        refusal = None
        if not self._models.are_started:
            refusal = unavailable("the first models are being loaded", code="loading")
        elif self._is_busy:
            refusal = ApiError(409, "another change is under way", code="busy", headers={"Retry-After": "1"})
        if refusal is not None:
            change.close()
            raise refusal
        self._is_busy = True
        try:
            return await self._models.in_background(change)
        except asyncio.CancelledError:
            raise unavailable("the server is shutting down", code="draining") from None
        finally:
            self._is_busy = False

    async def _open(self, name: str, path: Path) -> ModelHost:
        """A model that could be served: its set checked as at start, nothing started."""

        def work() -> ModelHost:
            shard_set = ShardSet.open(path)
            if self._options.verify_on_load:
                _verify(shard_set)
            return self._models.make_host(name, shard_set)

        return await asyncio.to_thread(work)

    def _launch(self, host: ModelHost, taken: list[int]) -> LaunchOptions:
        return launch_for(host.model.shard_set, self._models.launch, taken)

    def _room_without(self, old: ModelHost) -> Mapping[int, int]:
        """What can be free at best once a model is gone: how much of it is a cache's now is not known from here."""
        room = total_bytes(self._models.launch.device)
        for host in self._models.everyone - {old}:
            for r in needs(host.model.shard_set, host.launch) if host.launch is not None else ():
                if r.place != HOST:
                    room[r.place] -= r.fixed
        return {**room, HOST: host_free_bytes()}


def _verify(shard_set: ShardSet) -> None:
    """Raise CheckpointError unless the weights have the plan's hashes."""
    from ...shardplan.verify import verify_set

    faults = verify_set(shard_set)
    if faults:
        raise CheckpointError(
            f"{shard_set.path}: {counted(len(faults), 'fault')}, the first: {faults[0]}", "see mgtp verify"
        )
