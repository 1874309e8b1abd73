"""`mgtp` with ranks of tests/faulty_rank.py. The stage that is to hang has a short limit: MGTP_TEST_STAGE_SECONDS."""

from __future__ import annotations

import os
import sys

from mgtp.cli.app import main
from mgtp.runtime import stages
from mgtp.runtime.launch import group

if __name__ == "__main__":
    group.RANK_MODULE = "tests.faulty_rank"
    stage = os.environ["MGTP_TEST_FAULT"].split(":")[1]
    if "MGTP_TEST_STAGE_SECONDS" in os.environ and stage in stages.SECONDS:
        stages.SECONDS[stage] = float(os.environ["MGTP_TEST_STAGE_SECONDS"])
    sys.exit(main())
