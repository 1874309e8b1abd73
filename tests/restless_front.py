"""`mgtp` whose server starts failed ranks again without growing pauses, so that a test can break it many times."""

from __future__ import annotations

import sys

from mgtp.cli.app import main
from mgtp.runtime.server import restarts

if __name__ == "__main__":
    restarts.LONGEST_PAUSE_SECONDS = restarts.FIRST_PAUSE_SECONDS
    sys.exit(main())
