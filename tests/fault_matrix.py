"""Every way for a rank to fail, at every stage, under every command that starts ranks: stage x fault x rank x command.

A case passes when the command ends in time with exit code 5, says in one line which rank failed, in which stage and
how, and leaves no process and no file.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import httpx

from mgtp.runtime.stages import DEVICE, IMPORT, LOAD, ORDER, RENDEZVOUS, RUNNING, SELF_TEST, SPAWN, WARM_UP
from tests.faulty_rank import FAULTS
from tests.processes import assert_nothing_left, environment

REPOSITORY = Path(__file__).resolve().parent.parent
CASE_SECONDS = 120

STEP_SECONDS = "3"
HANG_SECONDS = {SPAWN: 10, IMPORT: 30, DEVICE: 5, RENDEZVOUS: 5, SELF_TEST: 5, LOAD: 5, WARM_UP: 5}
"""Limits of the stage that hangs: long enough for the other rank, which does not, on a busy machine."""

COMMANDS = {
    "generate": ("--prompt", "x", "--max-tokens", "200", "--ignore-eos", "--step-timeout", STEP_SECONDS),
    "serve": ("--port", "0", "--step-timeout", STEP_SECONDS),
    "bench": ("--batches", "1", "--prefills", "", "--requests", "0", "--prompt-tokens", "4", "--output-tokens", "9",
              "--step-timeout", STEP_SECONDS),
    "probe-memory": (),
}  # fmt: skip

WORDS = {
    "raise": "ValueError: wrong on purpose",
    "exit": "exited with code 3",
    "kill": "was killed by SIGKILL",
    "stop": "is stopped (SIGSTOP)",
    "crash": "was killed by SIGSEGV",
}


@dataclass(frozen=True)
class Case:
    """`rank` of two has `fault` in `stage` while `command` runs with further `options`.

    `place` is where in the stage; left out, as soon as it begins, or in the middle of a step.
    """

    stage: str
    fault: str
    rank: int
    command: str
    options: tuple[str, ...] = ()
    place: str = ""

    def __str__(self) -> str:
        return f"{self.command}-{self.stage}-{self.fault}-rank{self.rank}"

    @property
    def words(self) -> str:
        """What the error says of how it happened."""
        if self.fault == "hang":
            return "has not finished a step" if self.stage == RUNNING else "is not ready after"
        return WORDS[self.fault]


def all_cases() -> list[Case]:
    """The matrix, but for a step of probe-memory that hangs: it has no time limit for steps."""
    stages, ranks = (*ORDER, RUNNING), (0, 1)
    cases = [Case(*c) for c in product(stages, FAULTS, ranks, COMMANDS)]
    return [c for c in cases if (c.stage, c.fault, c.command) != (RUNNING, "hang", "probe-memory")]


def share(count: int, seed: int) -> list[Case]:
    """`count` cases: another stage and fault each, as long as there are any; hangs, which take long, are left out."""
    cases = [c for c in all_cases() if c.fault != "hang"]
    random.Random(seed).shuffle(cases)
    chosen: list[Case] = []
    for case in cases:
        if len(chosen) < count and all(case.stage != c.stage for c in chosen):
            chosen.append(case)
    return chosen


def run(case: Case, folder: Path, shard_set: str) -> float:
    """Run one case and check everything; how long it took."""
    begin = time.monotonic()
    process = _start(case, folder, shard_set)
    watchdog = threading.Timer(CASE_SECONDS, process.kill)
    watchdog.start()
    try:
        told = _ask(process) if case.command == "serve" and case.stage == RUNNING else None
        assert process.stderr is not None
        err = process.stderr.read()
        code = process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
    assert code == 5, f"exit code {code}:\n{err}"
    error = next(line for line in err.splitlines() if line.startswith("error: "))
    for part in (f"rank {case.rank} ", f"stage {case.stage!r}", case.words):
        assert part in error, f"{part!r} is not in {error!r}"
    assert f"\n{error}\nhint: " in "\n" + err
    if case.fault == "exit":
        assert f"rank {case.rank}: last words on stderr\n" in err
    if told is not None:
        assert f"rank {case.rank} " in told and case.words in told, told
    assert_nothing_left(folder)
    return time.monotonic() - begin


def start_faulty(fault: str, folder: Path, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """`mgtp` with `arguments`, one of its ranks having a fault of tests/faulty_rank.py."""
    variables = environment(folder, MGTP_TEST_FAULT=fault, **extra)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), variables.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faulty_front", *arguments],
        env=variables,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _start(case: Case, folder: Path, shard_set: str) -> subprocess.Popen[str]:
    limit = str(HANG_SECONDS.get(case.stage, "")) if case.fault == "hang" else ""
    extra = {"MGTP_TEST_STAGE_SECONDS": limit} if limit else {}
    arguments = (case.command, shard_set, "--device", "cpu", *COMMANDS[case.command], *case.options)
    return start_faulty(f"{case.rank}:{case.place or case.stage}:{case.fault}", folder, *arguments, **extra)


def _ask(process: subprocess.Popen[str]) -> str:
    """Send a server a request as soon as it takes any; the error that a client gets."""
    assert process.stderr is not None
    url = next(line.split()[-1] for line in process.stderr if "listening on " in line)
    assert any(" ready in " in line for line in process.stderr)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        body = {"prompt": "x", "max_tokens": 50, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                assert answer.status_code == 503
                return json.loads(answer.read())["error"]["message"]
            last = [text for text in answer.iter_lines() if text][-1]
            return json.loads(last.removeprefix("data: "))["error"]["message"]
