"""`--restart on-failure`: the port stays, clients are told the truth, the ranks come back, and only so often."""

from __future__ import annotations

import json
import os
import signal

import httpx

from mgtp.runtime.server.restarts import LONGEST_PAUSE_SECONDS, WINDOW_SECONDS, Restarts
from tests.processes import mgtp_here, rank_pid
from tests.servers import ServerProcess, wait_for

LONG = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "y", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def test_pauses_double_up_to_a_limit():
    restarts = Restarts(limit=20)
    pauses = [restarts.note(now=0.0) for _ in range(20)]
    assert pauses[:4] == [0.5, 1, 2, 4]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert restarts.count == 20 and not restarts.allowed(1.0)


def test_old_restarts_do_not_count():
    """A server that fails now and then, but not often, is always started again, after the shortest pause."""
    restarts = Restarts(limit=1)
    for failure in range(5):
        now = failure * (WINDOW_SECONDS + 1)
        assert restarts.allowed(now)
        assert restarts.note(now) == 0.5
        assert not restarts.allowed(now + WINDOW_SECONDS)


def test_never_is_the_default():
    assert not Restarts(limit=0).allowed(0.0)


def test_options():
    """Refused before the port is bound or a folder is opened."""
    error = mgtp_here("serve", "nowhere", "--restart", "always", code=2).err
    assert "--restart 'always'" in error and "on-failure" in error
    error = mgtp_here("serve", "nowhere", "--max-restarts", "3", code=2).err
    assert "--max-restarts 3" in error and "--restart on-failure" in error


def test_ranks_come_back_until_the_limit(run_folder, served_checkpoint, sharded):
    server = ServerProcess(run_folder, sharded(served_checkpoint, 2), "--restart", "on-failure", "--max-restarts", "1")
    text = server.complete(**SHORT)["choices"][0]["text"]
    error = kill_in_a_stream(server, 0)
    assert "rank 0 was killed by SIGKILL" in error["message"] and error["code"] == "rank_failed"
    assert_restarting(server, 0)
    server.wait_until_ready()
    assert server.complete(**SHORT)["choices"][0]["text"] == text
    assert server.metric(f'mgtp_restarts_total{{model="{server.model}"}}') == 1
    assert server.http.get("/status").json()["restarts"] == 1
    os.kill(rank_pid(server.folder, 1), signal.SIGKILL)
    assert server.wait() == 5
    assert any(line.startswith("error: rank 1 was killed") and "after 1 restart" in line for line in server.log)


def test_sigterm_while_restarting(run_folder, served_checkpoint, sharded):
    """It is an orderly end all the same."""
    server = ServerProcess(run_folder, sharded(served_checkpoint, 1), "--restart", "on-failure")
    os.kill(rank_pid(server.folder, 0), signal.SIGKILL)
    server.wait_for_line("starts again")
    assert server.stop() == 0


def kill_in_a_stream(server: ServerProcess, rank: int) -> dict[str, str]:
    """The error that a stream ends with when a rank is killed."""
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(rank_pid(server.folder, rank), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    return json.loads(last.removeprefix("data: "))["error"]


def assert_restarting(server: ServerProcess, rank: int) -> None:
    """Alive, not ready, and requests are told why and when to come back."""

    def is_restarting(answer: httpx.Response) -> bool | None:
        assert answer.status_code == 200
        return answer.json()["status"] == "restarting" or None

    wait_for(lambda: is_restarting(server.http.get("/health")), 5, server.process)
    ready = server.http.get("/ready")
    assert ready.status_code == 503 and ready.headers["retry-after"]
    refused = server.post("/v1/completions", SHORT)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert f"rank {rank} was killed" in refused.json()["error"]["message"]
