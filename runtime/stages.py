"""The stages of a rank's start, in their order, and how long each may take."""

from __future__ import annotations

from pathlib import Path

SPAWN, IMPORT, DEVICE, RENDEZVOUS, SELF_TEST, LOAD, WARM_UP = ORDER = (
    "spawn",
    "import",
    "device",
    "rendezvous",
    "self-test",
    "load",
    "warm-up",
)
RUNNING = "running"

SECONDS = {SPAWN: 60.0, IMPORT: 300.0, DEVICE: 120.0, RENDEZVOUS: 300.0, SELF_TEST: 60.0, LOAD: 120.0, WARM_UP: 600.0}
"""Limits that only something broken exceeds; loading gets more time with the size of the file."""

SLOWEST_READ = 20e6
"""Bytes a second: a file that comes more slowly than this, from a network or a worn disk, is not waited for."""

STEP_SECONDS = {"cuda": 60.0, "cpu": 600.0}
"""How long a step may take unless the user says otherwise: a long prompt on few cores is slow, not broken."""


def stage_limits(largest_file: int) -> dict[str, float]:
    """Seconds that each stage may take, when the largest file that a rank loads has so many bytes."""
    return {**SECONDS, LOAD: SECONDS[LOAD] + largest_file / SLOWEST_READ}


def position(stage: str) -> int:
    """How far a rank is: the index of its stage, running ranks being the furthest."""
    return ORDER.index(stage) if stage in ORDER else len(ORDER)


def stage_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stage: a message could be lost when it is killed, what is in a file stays."""
    return folder / f"stage-{rank}"
