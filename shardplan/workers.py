"""Threads whose start a signal does not cut short.

A signal handler that raises (Ctrl-C's does) inside `Thread.start` leaves the thread half registered: it dies with a
KeyError of the interpreter's own bookkeeping. So the signals wait until the thread runs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold what SIGINT, SIGTERM and SIGHUP do until the block has ended.

    Handlers run in the main thread only, whichever thread the system gives a signal to: blocking it in one is not enough.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    arrived: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        for number in handlers:
            signal.signal(number, handlers[number])
        for number in arrived:
            handlers[number](number, None)  # not raise_signal: an event loop, which listens by a file, has heard of it


def start_threads(threads: Iterable[threading.Thread]) -> None:
    """Start all of them."""
    with signals_held():
        for thread in threads:
            thread.start()


class WorkerPool(ThreadPoolExecutor):
    """A thread pool that is started as above, and that drops what it has not begun when its block is left."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `ThreadPoolExecutor.submit`."""
        with signals_held():
            return super().submit(fn, *args, **kwargs)

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown(cancel_futures=True)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
