"""How far a long piece of work is: a bar on a terminal, a line now and then otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..shardplan.values import counted

LINE_SECONDS = 30.0
"""Time between two lines where there is no terminal: short work says nothing."""

log = logging.getLogger("mgtp.cli")


@contextmanager
def bytes_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A callback (bytes done, bytes in all) that shows bytes, rate and time left of `what` on stderr."""
    from .console import stderr_is_terminal

    if not stderr_is_terminal() or not log.isEnabledFor(logging.INFO):
        yield _lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(what: str) -> Callable[[int, int], None]:
    from .console import human_bytes

    begin = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_SECONDS:
            last = now
            rate = human_bytes(done / (now - begin))
            log.info("%s: %s of %s, %s/s", what, human_bytes(done), human_bytes(total), rate)

    return show


@contextmanager
def requests_progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """A callback (requests done of `total`, tokens generated) that shows both, tokens per second and the time left."""
    from .console import stderr_is_terminal

    begin = time.monotonic()
    if not stderr_is_terminal() or not log.isEnabledFor(logging.INFO):
        last = begin

        def show(done: int, tokens: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= LINE_SECONDS:
                last = now
                log.info("%d of %s, %.0f tokens/s", done, counted(total, "request"), tokens / (now - begin))

        yield show
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total, rate=0.0)

        def update(done: int, tokens: int) -> None:
            progress.update(task, completed=done, rate=tokens / max(time.monotonic() - begin, 1e-9))

        yield update
