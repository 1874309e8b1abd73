"""Ranks that fail on GPUs: named within two seconds, exit code 5, and no process and no GPU memory left."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tests.servers
from tests import tiny
from tests.processes import assert_nothing_left, rank_pid, start
from tests.servers import ServerProcess, wait_for
from tests.tiny_checkpoints import write_tokenizer

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")]

NOTICED_SECONDS = 2.0
START_SECONDS = 120
MEMORY_SECONDS, MEMORY_BYTES = 10, 64 << 20
CONTEXT = 16384
SHARED, NCCL = ("--devices", "0", "--allow-shared-device"), ("--devices", "0,1", "--collective", "nccl")
LAYOUTS = [
    pytest.param(SHARED, id="one GPU"),
    pytest.param(NCCL, id="nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]
COMMON = ("--device", "cuda", "--kv-cache-memory", "128MiB")

FAULTS = {
    "kill": (1, "was killed by SIGKILL"),
    "stop": (0, "is stopped (SIGSTOP)"),
    "raise": (1, "ValueError: wrong on purpose"),
    "device": (1, "device-side assert"),
}
"""Which rank fails, and what is said of it."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@pytest.fixture(scope="module")
def shard_set(tmp_path_factory, sharded) -> str:
    """Two ranks of a small Llama of shapes that are usual on GPUs."""
    folder = tmp_path_factory.mktemp("faults") / "model"
    tiny.write_llama(folder, hidden=512, ffn=1024, heads=8, kv=4, layers=4, max_position_embeddings=CONTEXT)
    write_tokenizer(folder)
    return sharded(folder, 2, "bfloat16")


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request) -> Iterator[tuple[str, ...]]:
    """Options that place two ranks. Once every test has run there, the GPUs have the memory they had before."""
    devices = range(torch.cuda.device_count())
    before = [_free(i) for i in devices]
    yield request.param
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers' tests come and go on the same GPUs
        wait_for(lambda: all(_free(i) >= before[i] - MEMORY_BYTES for i in devices) or None, MEMORY_SECONDS)


def _free(device: int) -> int:
    return torch.cuda.mem_get_info(device)[0]


@pytest.fixture(scope="module")
def servers(layout, shard_set) -> Iterator[dict[str, ServerProcess]]:
    """A server for every fault, started side by side: starting is what takes the time."""
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.servers, "START_SECONDS", START_SECONDS)

        def serve(fault: str) -> ServerProcess:
            folder = Path(name) / fault
            folder.mkdir()
            variables = {"MGTP_TEST_FAULT": f"{FAULTS[fault][0]}:running:{fault}"}
            variables["module"] = "mgtp.cli" if fault in SIGNALS else "tests.faulty_front"
            options = (*COMMON, *layout, "--max-num-seqs", "2")
            return ServerProcess(folder, shard_set, *options, wait=True, **variables)

        with ThreadPoolExecutor(len(FAULTS)) as pool:
            starting = {fault: pool.submit(serve, fault) for fault in FAULTS}
        started = {fault: future.result() for fault, future in starting.items() if future.exception() is None}
        try:
            assert started.keys() == FAULTS.keys(), [f.exception() for f in starting.values()]
            yield started
        finally:
            for server in started.values():
                server.process.kill()
                server.process.wait()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_of_a_server_fails(fault, servers):
    server, (rank, words) = servers[fault], FAULTS[fault]
    body = {"prompt": [5, 6, 7], "max_tokens": CONTEXT - 100, "ignore_eos": True, "temperature": 0, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 200:
            lines = (line for line in answer.iter_lines() if line)
            if fault in SIGNALS:
                for _ in range(5):
                    next(lines)
            begin = _break(server.folder, rank, fault)
            told = json.loads(list(lines)[-1].removeprefix("data: "))
        else:
            begin, told = time.monotonic(), json.loads(answer.read())
    seconds = time.monotonic() - begin
    message = told["error"]["message"]
    assert f"rank {rank} " in message, message
    assert server.wait() == 5
    # What a broken device makes of a process need not be an exception: then its last words are in the log.
    assert words in (message if fault != "device" else "\n".join([message, *server.log])), message
    assert seconds < NOTICED_SECONDS, f"noticed after {seconds:.2f} s"
    error = next(line for line in server.log if line.startswith("error: "))
    assert f"rank {rank} " in error and "stage 'running'" in error, error
    print(f"{fault}: the client was told after {seconds:.2f} s: {message}")


def _break(folder: Path, rank: int, fault: str) -> float:
    """Send the signal, if that is the fault; since when it is there."""
    if fault in SIGNALS:
        os.kill(rank_pid(folder, rank), SIGNALS[fault])
    return time.monotonic()


@pytest.mark.parametrize(("rank", "fault"), [(0, "kill"), (1, "stop")])
def test_a_rank_of_generate_fails(rank, fault, layout, shard_set):
    options = ("--prompt-ids", "5,6,7", "--max-tokens", str(CONTEXT - 100), "--ignore-eos", "--temperature", "0")
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as name:
        folder = Path(name)
        process = start(folder, "generate", shard_set, *options, *COMMON, *layout)
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.read(5), process.stderr.read()
            begin = _break(folder, rank, fault)
            error = next(line for line in process.stderr if line.startswith("error: "))
            seconds = time.monotonic() - begin
            process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 5
        assert f"rank {rank} {FAULTS[fault][1]} in stage 'running'" in error
        # The ranks have been ended, and their memory given back, before the error is printed.
        assert seconds < NOTICED_SECONDS + 5, f"said after {seconds:.2f} s"
        assert_nothing_left(folder)
        print(f"{fault}: generate ended after {seconds:.2f} s: {error}")
