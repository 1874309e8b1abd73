"""A rank's process: `python -m mgtp.runtime.rank`, started by the front with torchrun's environment."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rank_link import RankLink


def die_with_parent() -> None:
    """End this process when the front ends, however it ends.

    The parent-death signal covers a front that is killed; end-of-file on the lifeline covers one that was gone before
    the signal was asked for, and systems that have no such signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    lifeline = int(os.environ["MGTP_LIFELINE"])

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_rank(work: Callable[[RankLink], None]) -> None:
    """Do a rank's work and end the process. A failure is reported to the front before that."""
    die_with_parent()
    # Says where this rank is when the front asks, also from within a collective: no interpreter lock is needed.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    from . import stages
    from .rank_link import RankLink

    link = RankLink.from_environment()
    try:
        link.open()
        link.stage(stages.IMPORT)
        work(link)
    except BaseException as error:
        link.report(error)
        sys.stderr.flush()
        # Not sys.exit: a rank that has failed must not wait in a destructor for its peers.
        os._exit(1)
    link.close()
    os._exit(0)


def main() -> None:
    """Run this rank until the front says stop."""

    def serve(link: RankLink) -> None:
        gc.disable()  # what importing torch makes stays: looking through it for garbage takes a sixth of the time
        from .rank_worker import RankWorker

        gc.enable()
        RankWorker(link).run()

    run_rank(serve)


if __name__ == "__main__":
    main()
