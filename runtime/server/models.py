"""The served models by name. A model is one group of rank processes; requests find it here, and see all of it or none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from ...shardplan.errors import MgtpError
from ...shardplan.shard_set import ShardSet
from ..launch.room import share_out
from ..launch.start import LaunchOptions
from .errors import ApiError, unavailable, unknown_model
from .host import ModelHost, OnStage
from .metrics import Metrics, ModelMetrics
from .model import ServedModel
from .options import ServerOptions

log = logging.getLogger("mgtp.server")

T = TypeVar("T")

NO_MODEL = "no model loaded"

_WORST_FIRST = ("failed", "restarting", "replacing", "loading", "stalled")


class Models:
    """What is served. `launch` says where ranks may run; it is the same for all models."""

    def __init__(self, launch: LaunchOptions, options: ServerOptions, metrics: Metrics) -> None:
        self.launch, self.options = launch, options
        self._metrics = metrics
        self._hosts: dict[str, ModelHost] = {}
        self._default: str | None = None
        self._leaving: set[ModelHost] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_failed = asyncio.Event()
        self._failure: BaseException | None = None
        self.are_started = False

    def __iter__(self) -> Iterator[ModelHost]:
        return iter(list(self._hosts.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._hosts

    def find(self, name: str | None) -> ModelHost:
        """The model of that name, the default one when none is named; raises ApiError."""
        if not self._hosts:
            raise unavailable(NO_MODEL, code="no_model")
        if name is None:
            if self._default is None or self._default not in self._hosts:
                there = ", ".join(map(repr, self._hosts))
                raise unavailable(
                    f"the default model {self._default!r} is not loaded, name another: {there}", code="no_model"
                )
            return self._hosts[self._default]
        if name not in self._hosts:
            raise unknown_model(name, list(self._hosts))
        return self._hosts[name]

    @property
    def everyone(self) -> set[ModelHost]:
        """All models that have ranks, those included whose place is taken and that finish what they do."""
        return {*self._hosts.values(), *self._leaving}

    @property
    def status(self) -> str:
        """That of the model that is worst off, NO_MODEL when there is none."""
        if not self._hosts:
            return NO_MODEL
        statuses = {host.status for host in self}
        return next((status for status in _WORST_FIRST if status in statuses), "ready")

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return sum(host.num_unfinished for host in self.everyone)

    @property
    def have_served(self) -> bool:
        """Whether any ranks have been ready."""
        return any(host.model.ready for host in self)

    def make_host(self, name: str, shard_set: ShardSet) -> ModelHost:
        """A model that could be served; reads its tokenizer."""
        model = ServedModel(name, shard_set, int(time.time()))
        return ModelHost(model, self.options, ModelMetrics(self._metrics, name))

    def add(self, name: str, shard_set: ShardSet) -> None:
        """A model that `run` is to start."""
        self._put(self.make_host(name, shard_set))

    def _put(self, host: ModelHost) -> None:
        """The first model becomes the default one."""
        if not self._hosts:
            self._default = host.name
        self._hosts[host.name] = host

    async def run(self, on_stage: OnStage | None = None) -> None:
        """Start the models that were added and watch all there are; raises the error of one that fails for good."""
        starting = asyncio.ensure_future(self._start_all(on_stage))
        failing = asyncio.ensure_future(self._has_failed.wait())
        try:
            await asyncio.wait((starting, failing), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            await failing
            assert self._failure is not None
            raise self._failure
        finally:
            starting.cancel()
            failing.cancel()
            await asyncio.gather(starting, failing, return_exceptions=True)

    async def _start_all(self, on_stage: OnStage | None) -> None:
        """One after the other, so that each finds the memory that the others have left."""
        hosts = list(self)
        launches = share_out({host.name: host.model.shard_set for host in hosts}, self.launch)
        for host, launch in zip(hosts, launches, strict=True):
            try:
                await host.start(launch, on_stage)
            except MgtpError as error:
                raise self._named(host, error) from None
            self.take_in(host)
            log.info("serving %s", host.name)
        self.are_started = True

    def take_in(self, host: ModelHost) -> None:
        """Serve a model whose ranks are ready, and hear of it when they fail for good."""
        self._put(host)
        host.publish()
        assert host.task is not None
        host.task.add_done_callback(lambda task: self._note_end(host, task))

    def drop(self, name: str) -> None:
        """Serve a model no more. The default one stays it: no other silently answers in its place."""
        self._hosts.pop(name, None)

    def give_up_default(self, name: str) -> None:
        """When `name` is the default, the model that has been there longest is it now."""
        if name == self._default:
            self._default = next(iter(self._hosts), None)

    def _named(self, host: ModelHost, error: MgtpError) -> MgtpError:
        """An error with its model's name, where there are several."""
        if len(self._hosts) < 2:
            return error
        named = type(error)(f"model {host.name!r}: {error.message}", error.hint)
        named.exit_code = error.exit_code
        return named

    def _note_end(self, host: ModelHost, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if host.is_retired and isinstance(error, MgtpError):
            log.warning("%s, whose place is taken: %s", host.name, error)
        else:
            self._failure = self._named(host, error) if isinstance(error, MgtpError) else error
            self._has_failed.set()

    def devices(self, but: ModelHost | None = None) -> list[int]:
        """The GPUs of all ranks, one entry each."""
        launches = [host.launch for host in self.everyone if host is not but]
        return [index for launch in launches if launch is not None for index in launch.devices or ()]

    async def see_off(self, host: ModelHost, seconds: float, last_words: str) -> int:
        """Let a retired model finish what it does, within `seconds`, and end its ranks; how many sequences were cut."""
        self._leaving.add(host)
        deadline = time.monotonic() + seconds
        while host.num_unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        unfinished = host.num_unfinished
        host.fail_all(unavailable(last_words, code="unloaded"))
        await host.stop()
        self._leaving.discard(host)
        return unfinished

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that `stop` ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self) -> None:
        """The server is shutting down: what fails from now on is not started again."""
        for host in self:
            host.end()

    def fail_all(self, error: ApiError) -> None:
        """End every request with an error."""
        for host in self.everyone:
            host.fail_all(error)

    async def stop(self) -> None:
        """End every rank."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(host.stop() for host in self.everyone))
