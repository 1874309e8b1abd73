"""A leader that computes nothing: every sequence gets a random token a step, to see how much the front alone can pass on.

server_speed.py --front-only starts it in the place of mgtp.runtime.rank. A step takes MGTP_STEP_SECONDS at least.
"""

from __future__ import annotations

import os
import random
import time

from mgtp.runtime import rank, stages
from mgtp.runtime.messages import Abort, Ready, Request, Stats, Stop, TokenOutput, Tokens
from mgtp.runtime.rank_link import RankLink

CONTEXT, BLOCKS = 1 << 20, 1 << 20


def serve(link: RankLink) -> None:
    """Say that all is well, then hand out tokens until told to stop."""
    link.stage(stages.WARM_UP)
    link.send(Ready(0, os.getpid(), "none", 1, BLOCKS, CONTEXT, 1e-3))
    link.enter(stages.RUNNING)
    least, tokens = float(os.environ.get("MGTP_STEP_SECONDS", "0")), random.Random(0)
    left: dict[str, int] = {}
    while True:
        begin = time.monotonic()
        while (message := link.receive(0 if left else None)) is not None:
            if isinstance(message, Stop):
                return
            if isinstance(message, Request):
                left[message.id] = message.sampling.max_tokens
            elif isinstance(message, Abort):
                left.pop(message.id, None)
            if not left:
                link.send(Stats(0, 0, 0, BLOCKS, 0, 0, 0, [], []))
        link.send(Tokens([TokenOutput(i, tokens.randrange(256), None if n > 1 else "length") for i, n in left.items()]))
        left = {i: n - 1 for i, n in left.items() if n > 1}
        time.sleep(max(0.0, begin + least - time.monotonic()))


if __name__ == "__main__":
    rank.run_rank(serve)
