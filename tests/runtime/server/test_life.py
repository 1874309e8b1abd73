"""A server's life: clients that leave, too many of them, ranks that die, signals, and ports that are taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.processes import mgtp, mgtp_here, rank_pid, run_folders
from tests.servers import ServerProcess, wait_for

LONG = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def shard_set(served_checkpoint, sharded):
    return sharded(served_checkpoint, 2)


@pytest.fixture(scope="module")
def one_rank(served_checkpoint, sharded):
    """For what has nothing to do with the number of ranks."""
    return sharded(served_checkpoint, 1)


def ask(server: ServerProcess, body: dict) -> socket.socket:
    """A connection over which a completion has been asked for."""
    address, content = httpx.URL(server.url), json.dumps(body).encode()
    connection = socket.create_connection((address.host, address.port or 0), 10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


def test_clients_that_go_away_free_their_blocks(server):
    """Streams and whole answers, all of them cut off; what is running beside them is not disturbed."""
    expected = server.complete(prompt="y", max_tokens=300, temperature=0, ignore_eos=True)["choices"][0]["text"]
    beside: list[str] = []
    thread = threading.Thread(
        target=lambda: beside.append(
            server.complete(prompt="y", max_tokens=300, temperature=0, ignore_eos=True)["choices"][0]["text"]
        )
    )
    thread.start()
    for index in range(50):
        with ask(server, {**LONG, "stream": index % 2 == 0}) as connection:
            if index % 2 == 0:
                assert b"200 OK" in connection.recv(100)
    thread.join(60)
    assert beside == [expected]
    server.wait_until_idle()
    assert server.http.get("/ready").status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_is_no_fault_of_ours(server, is_stream):
    """The log says 499, as nginx does, and so do the metrics; whether or not the answer had begun."""
    before, line = len(server.log), "path=/v1/completions status=499"
    name = 'mgtp_requests_total{path="/v1/completions",status="499"}'
    with ask(server, {**LONG, "stream": is_stream}):
        wait_for(lambda: server.metric('mgtp_sequences{state="running"}') or None, 10)
    wait_for(lambda: any(line in each for each in server.log[before:]) or None, 10)
    assert server.metric(name) > 0
    assert not any("status=500" in each for each in server.log[before:])
    server.wait_until_idle()


def test_a_path_cannot_forge_lines_of_the_log(server):
    server.http.get("/x%0aforged%1b[31m")
    assert "path=/x%0Aforged%1B%5B31m" in server.wait_for_line("forged")


def test_many_streams_at_once(server):
    """More than can run: they wait their turn, and each gets its own text."""

    def ask(index: int) -> None:
        body = {"prompt": f"{index % 5}", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        events = server.events("/v1/completions", body)
        texts[index] = "".join(e["choices"][0]["text"] for e in events)

    texts = [""] * 40
    threads = [threading.Thread(target=ask, args=[i]) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(texts[i] == texts[i % 5] != "" for i in range(40))
    assert len(set(texts)) == 5


@pytest.fixture(scope="module")
def small(one_rank):
    """Room for one sequence and one that waits, half a second each, behind a key; its log is JSON."""
    with run_folders() as folder:
        limits = ("--max-num-seqs", "1", "--max-queue", "1", "--request-timeout", "1", "--drain-timeout", "0.3")
        form = ("--log-format", "json")
        small = ServerProcess(folder, one_rank, *limits, *form, MGTP_API_KEY="secret\n")  # as out of a file
        small.http.headers["authorization"] = "Bearer secret"
        yield small  # the last test ends it


def test_key(small):
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": ""}):
        answer = small.http.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert small.http.get("/v1/models").status_code == 200
    assert httpx.get(f"{small.url}/health", trust_env=False).status_code == 200


def test_overload_and_time_limit(small):
    """The third sequence is refused at once; the first two end at the time limit, the streamed one with an event."""
    with small.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = small.post("/v1/completions", {**LONG, "n": 2})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert small.post("/v1/completions", {**LONG, "n": 3}).status_code == 400
        assert small.post("/v1/completions", LONG).status_code == 504
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    small.wait_until_idle()


def test_log_is_json(small):
    small.post("/v1/completions", {"prompt": "seven..", "max_tokens": 3, "ignore_eos": True})
    line = small.wait_for_line('"prompt_tokens": 7, "completion_tokens": 3,')
    fields = json.loads(line)
    assert fields["path"] == "/v1/completions" and fields["status"] == 200 and fields["finish"] == "length"
    assert all(json.loads(each) for each in small.log)


def test_drain_has_an_end(small):
    with small.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        small.process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert small.wait() == 0


def test_a_killed_rank_ends_the_server(run_folder, shard_set):
    """Mid-stream: the stream gets an error event that names the rank, /health says so, the server exits with 5."""
    server = ServerProcess(run_folder, shard_set)
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(rank_pid(server.folder, 0), signal.SIGKILL)
        begin = time.monotonic()
        other = httpx.Client(base_url=server.url, timeout=5, trust_env=False)
        wait_for(lambda: other.get("/health").status_code == 503 or None, 2)
        last = [line for line in lines if line][-1]
        assert time.monotonic() - begin < 3
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "rank 0 was killed by SIGKILL" in error["message"]
    assert server.wait(15) == 5
    assert any(line.startswith("error: rank 0 was killed") for line in server.log)


def test_a_killed_rank_of_an_idle_server(run_folder, shard_set):
    server = ServerProcess(run_folder, shard_set)
    os.kill(rank_pid(server.folder, 1), signal.SIGKILL)
    assert server.wait(15) == 5


def test_sigterm_lets_streams_finish(run_folder, one_rank):
    server = ServerProcess(run_folder, one_rank)
    body = {**LONG, "max_tokens": 200, "stream": True}
    other = httpx.Client(base_url=server.url, timeout=10, trust_env=False)
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: other.get("/ready").status_code == 503 or None, 2)
        refused = other.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert other.get("/health").status_code == 200
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    other.close()
    assert server.wait() == 0


def test_signals_while_a_stream_would_go_on(run_folder, one_rank):
    """A second SIGTERM does not wait for anything."""
    server = ServerProcess(run_folder, one_rank)
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()  # which would close the connection when it goes
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("draining")
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 143
        assert time.monotonic() - begin < 5
    assert server.wait() == 143


def test_sigterm_while_loading(run_folder, one_rank):
    """The port answers before the model is there: alive, not ready."""
    server = ServerProcess(run_folder, one_rank, wait=False)
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 503
    refused = server.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert server.stop() == 0


def test_a_port_that_is_taken(run_folder, shard_set):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = mgtp(run_folder, "serve", shard_set, "--port", port, "--device", "cpu", code=1)
    assert run.err.splitlines()[0].endswith("Address already in use")
    error = mgtp_here("serve", shard_set, "--host", "192.0.2.1", "--port", "0", code=1).err
    assert "192.0.2.1:0: Cannot assign requested address\nhint: use an address of this machine with --host" in error
    assert port in run.err and "hint: " in run.err
