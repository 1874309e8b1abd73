"""Many clients at once, a third of whom leave; and as many requests as an hour brings, with memory that stays."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.processes import rank_pids, run_folders
from tests.servers import ServerProcess

pytestmark = pytest.mark.soak

NUM_STREAMS = 200
NUM_REQUESTS = 1500


@pytest.fixture
def server(tiny_checkpoint, sharded) -> Iterator[ServerProcess]:
    """A cache so small that all of it has been touched before memory is first measured."""
    limits = ("--max-num-seqs", "16", "--kv-cache-memory", "2MiB", "--max-model-len", "1024", "--max-queue", "4096")
    with run_folders() as folder:
        running = ServerProcess(folder, sharded(tiny_checkpoint("long32k"), 2), *limits)
        yield running
        assert running.stop() == 0, running.log


def body_of(chance: random.Random) -> dict[str, Any]:
    """A completion of some kind, which its seed makes the same every time."""
    return {
        "prompt": [chance.randrange(256) for _ in range(chance.choice((1, 5, 40, 150)))],
        "max_tokens": chance.randint(1, 60),
        "temperature": chance.choice((0, 0.7, 1.5)),
        "top_p": chance.choice((0.5, 1)),
        "seed": chance.getrandbits(40),
        "ignore_eos": True,
    }


async def stream(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> str | None:
    """The text of a streamed answer; None for a client that has left after so many events."""
    text, count, held = "", 0, b""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for chunk in answer.aiter_bytes():  # lines of text would also end at U+2028 and the like
            *events, held = (held + chunk).split(b"\n\n")
            for event in events:
                text += json.loads(event[6:])["choices"][0]["text"] if event != b"data: [DONE]" else ""
                count += 1
                if count == leave_after:
                    return None
    return text


async def all_at_once(url: str, bodies: list[dict[str, Any]], leaving: list[int | None]) -> list[str | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(stream(client, b, at) for b, at in zip(bodies, leaving, strict=True)))


def test_a_third_of_200_streams_is_cut_off_and_the_others_are_exact(server):
    chance = random.Random(1)
    bodies = [body_of(chance) for _ in range(NUM_STREAMS)]
    leaving = [1 + i % 7 if i % 3 == 0 else None for i in range(NUM_STREAMS)]
    for body, at in zip(bodies, leaving, strict=True):
        if at is not None:
            body["max_tokens"] = 500  # longer than anyone stays
    found = asyncio.run(all_at_once(server.url, bodies, leaving))
    server.wait_until_idle(30)
    for body, text, at in zip(bodies, found, leaving, strict=True):
        if at is None:
            assert text == server.complete(**body)["choices"][0]["text"]
        else:
            assert text is None
    server.wait_until_idle()


def resident(server: ServerProcess) -> dict[int, int]:
    """Bytes that the front and its ranks hold in memory of their own."""
    pids = [server.process.pid, *rank_pids(server.folder)]
    return {pid: psutil.Process(pid).memory_info().rss - psutil.Process(pid).memory_info().shared for pid in pids}


def test_memory_is_flat(server):
    chance = random.Random(2)

    def run(count: int) -> None:
        for _ in range(0, count, 50):
            bodies = [body_of(chance) for _ in range(50)]
            asyncio.run(all_at_once(server.url, bodies, [3 if i % 5 == 0 else None for i in range(50)]))

    run(500)
    before = resident(server)
    run(NUM_REQUESTS)
    after = resident(server)
    growth = {pid: (after[pid] - before[pid]) / (1 << 20) for pid in before}
    assert all(each < 24 for each in growth.values()), growth
    server.wait_until_idle()
