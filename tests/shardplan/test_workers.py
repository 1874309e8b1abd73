"""A signal that arrives while threads are started is handled when they run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from mgtp.shardplan.workers import WorkerPool, signals_held, start_threads


class Stop(Exception):
    """What the test's handler raises, as the command line's does."""


@pytest.fixture(autouse=True)
def raising_handler() -> Iterator[None]:
    def handler(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


class SignalledThread(threading.Thread):
    """Sends the process a signal in the middle of `start`."""

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super().start()


def test_signal_waits_until_the_threads_run() -> None:
    ran = threading.Event()
    threads = [SignalledThread(target=ran.set), threading.Thread(target=ran.set)]
    with pytest.raises(Stop):
        start_threads(threads)
    assert all(thread.ident is not None for thread in threads)
    for thread in threads:
        thread.join(10)
    assert ran.is_set()


def test_signal_in_a_block_comes_after_it_and_handlers_are_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    reached: list[bool] = []

    def block() -> None:
        with signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(True)

    with pytest.raises(Stop):
        block()
    assert reached
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_event_loop_hears_of_a_signal_once() -> None:
    """It listens by a file of its own: a second time would be a second signal, which a server takes for impatience."""
    heard: list[int] = []

    async def work() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.append, signal.SIGTERM)
        with signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)

    asyncio.run(work())
    assert heard == [signal.SIGTERM]


def test_other_threads_leave_signals_alone() -> None:
    handlers: list[object] = []

    def work() -> None:
        with signals_held():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert handlers == [signal.getsignal(signal.SIGTERM)]


def test_pool_drops_what_it_has_not_begun() -> None:
    begun, gate = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        gate.wait(10)

    def interrupted() -> None:
        with WorkerPool(1) as pool:
            last = [pool.submit(work, number) for number in range(50)][-1]
            last.add_done_callback(lambda _: gate.set())  # which its being dropped is
            raise Stop

    with pytest.raises(Stop):
        interrupted()
    assert len(begun) < 50
