"""A rank that fails as the environment says: MGTP_TEST_FAULT=RANK:STAGE:FAULT, such as 1:load:hang.

In stage 'running' it fails in the middle of a step, so that the others are in a collective, or come to one; in stage
'ring', while keys go round the ring, which they do however few they are.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from mgtp.runtime import rank, rank_link, stages

FAULTS = ("raise", "exit", "kill", "stop", "crash", "hang")
LAYER = 2
"""Of the first step: one sum over ranks is done, the next is not."""


def fail(fault: str) -> None:
    """Do what `fault` says; 'device' needs a GPU. 'hang' comes back after ten minutes: no test can leave it for ever."""
    if fault == "raise":
        raise ValueError("wrong on purpose")
    if fault == "exit":
        print("last words on stderr", file=sys.stderr, flush=True)
        os._exit(3)
    if fault == "hang":
        time.sleep(600)
    if fault == "device":
        break_device()
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}.get(fault)
    if number is not None:
        os.kill(os.getpid(), number)


def break_device() -> None:
    """Let a kernel on the GPU read what is not there: nothing more can be done there in this process."""
    import torch

    torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.int64, device="cuda")]


def at_stage(stage: str, fault: str) -> None:
    """Fail as soon as the front has been told of `stage`."""
    original: Callable[..., None] = rank_link.RankLink.stage

    def announce(link: rank_link.RankLink, name: str) -> None:
        original(link, name)
        if name == stage:
            fail(fault)

    setattr(rank_link.RankLink, "stage", announce)  # noqa: B010 - a type checker sees no method in it


def in_a_step(fault: str) -> None:
    """Fail in the second layer of the first step after the rank has become ready."""
    from mgtp.runtime.layers import mlp

    original, layers = mlp.GatedMLP.__call__, [0]
    serving = when_serving()

    def forward(module: mlp.GatedMLP, *args):
        if serving[0]:
            layers[0] += 1
            if layers[0] == LAYER:
                fail(fault)
        return original(module, *args)

    setattr(mlp.GatedMLP, "__call__", forward)  # noqa: B010


def in_the_ring(fault: str | None) -> None:
    """Fail instead of passing keys on for the second time; None: only let all keys go round the ring."""
    from mgtp.runtime import communicator
    from mgtp.runtime.parallel import attention

    attention.GATHER_BYTES = 0
    original, passed = communicator.HostCommunicator.shift, [0]
    serving = when_serving()

    def shift(group: communicator.HostCommunicator, *args):
        passed[0] += serving[0]
        if passed[0] == 2 and fault is not None:
            fail(fault)
        return original(group, *args)

    setattr(communicator.HostCommunicator, "shift", shift)  # noqa: B010


def when_serving() -> list[bool]:
    """A flag that is set once the rank has become ready."""
    from mgtp.runtime import rank_worker

    serving = [False]
    for name in ("lead", "follow"):
        loop = getattr(rank_worker.RankWorker, name)

        def begin(worker: rank_worker.RankWorker, loop: Callable = loop) -> None:
            serving[0] = True
            loop(worker)

        setattr(rank_worker.RankWorker, name, begin)
    return serving


def prepare() -> None:
    """Read the environment."""
    number, stage, fault = os.environ["MGTP_TEST_FAULT"].split(":")
    chosen = os.environ["RANK"] == number
    if stage == "ring":
        in_the_ring(fault if chosen else None)
    if not chosen or stage == "ring":
        return
    if stage == stages.SPAWN:
        rank.die_with_parent()  # what a rank begins with
        fail(fault)
    elif stage == stages.RUNNING:
        in_a_step(fault)
    else:
        at_stage(stage, fault)


if __name__ == "__main__":
    prepare()
    rank.main()
