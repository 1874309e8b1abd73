"""Long texts are worked on beside the event loop, a few at a time; short ones at once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from mgtp.runtime.server.model import ServedModel
from mgtp.shardplan.shard_set import ShardSet


def test_long_work_holds_up_nothing(served_checkpoint, sharded):
    model = ServedModel("tiny", ShardSet.open(Path(sharded(served_checkpoint, 1))), 0)
    may_end, seen = threading.Event(), list[str]()

    async def work() -> None:
        long = [asyncio.create_task(model.off_loop(1 << 20, may_end.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        assert await model.off_loop(10, lambda: threading.current_thread() is threading.main_thread())
        seen.append("short")
        assert not any(task.done() for task in long)
        long.pop().cancel()  # its client has left: what has not begun never does
        may_end.set()
        assert all(await asyncio.gather(*long))
        seen.append("long")

    asyncio.run(work())
    assert seen == ["short", "long"]
