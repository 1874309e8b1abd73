"""How many threads a rank on the CPU computes with. No torch: the front checks it."""

from __future__ import annotations

import os
import re

from ..shardplan.errors import UsageError

VARIABLE = "OMP_NUM_THREADS"


def asked_threads() -> int | None:
    """What OMP_NUM_THREADS says, None when it says nothing; of one number a level of nesting (4,2) the first counts."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    first = text.split(",")[0].strip()
    if not re.fullmatch("[1-9][0-9]{0,4}", first):
        raise UsageError(f"{VARIABLE}={text} is not a number of threads", "give a whole number: 1, 2, ..., or unset it")
    return int(first)


def share_of_cores(num_ranks: int) -> int:
    """Threads of each of `num_ranks` ranks where nobody says how many; macOS has no affinity."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)
