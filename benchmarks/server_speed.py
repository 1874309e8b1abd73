"""What the HTTP server costs: the same work given to the engine directly, and to the server by a client of its own.

    python benchmarks/server_speed.py benchmarks/llama_8b.json --dummy-weights [--requests 512] [--device cuda]
    python benchmarks/server_speed.py benchmarks/llama_8b.json --front-only   # no engine: how fast the front is alone

Two figures: output tokens a second of all requests sent at once, streamed over connections that are open already; and
the median time between the tokens of a single stream beside the engine's decode step. Prompts are token ids, answers
text: with --dummy-weights the vocabulary is made up too. Prints a table on stderr and one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mgtp.runtime.dummy import dummy_shard_set
from mgtp.runtime.launch import group
from mgtp.runtime.launch.bench import Bench
from mgtp.runtime.launch.bench_options import BenchOptions
from mgtp.runtime.launch.start import LaunchOptions, start_ranks
from mgtp.runtime.server.life import Life, bind
from mgtp.runtime.server.options import ServerOptions
from mgtp.shardplan.shard_set import ShardSet

PORT_VARIABLE = "SERVER_SPEED_SOCKET"
READY_SECONDS = 300
SINGLE_STREAMS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a shard set; with --dummy-weights or --front-only a config.json")
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--front-only", action="store_true", help="tokens come from token_rank.py")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shard_set = open_set(arguments, Path(folder))
        if PORT_VARIABLE in os.environ:
            serve(arguments, shard_set, socket.socket(fileno=int(os.environ[PORT_VARIABLE])))
            return
        report: dict[str, Any] = {"model": str(arguments.model), "requests": arguments.requests}
        if not arguments.front_only:
            report |= offline(arguments, shard_set)
        report |= online(arguments, shard_set.model.vocab_size)
    if not arguments.front_only:
        report["ratio"] = round(report["server_tokens_per_s"] / report["offline_tokens_per_s"], 4)
        report["single_ratio"] = round(report["single_median_ms"] / report["decode_step_ms"], 4)
    for name, value in report.items():
        print(f"{name:28} {value}", file=sys.stderr)
    print(json.dumps(report))


def open_set(arguments: argparse.Namespace, folder: Path) -> ShardSet:
    """The shard set, or what a config alone makes of it: random weights and made-up words."""
    if not (arguments.dummy_weights or arguments.front_only):
        return ShardSet.open(arguments.model, tp_size=arguments.tp_size)
    config = arguments.model / "config.json" if arguments.model.is_dir() else arguments.model
    (folder / "config.json").write_bytes(config.read_bytes())
    shard_set = dummy_shard_set(folder, arguments.tp_size)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(shard_set.model.vocab_size)))
    return replace(shard_set, path=folder)


def tokenizer(size: int) -> dict[str, Any]:
    """A tokenizer.json of `size` tokens, as byte-level as Llama 3's: all bytes, then words."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in printable] + [chr(0x100 + n) for n in range(256 - len(printable))]
    words = [f"\u0120w{n:x}" for n in range(size - 256)]
    vocabulary = {token: i for i, token in enumerate((letters + words)[:size])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}


def launch_options(arguments: argparse.Namespace) -> LaunchOptions:
    """The same for both."""
    return LaunchOptions(
        device=arguments.device,
        max_model_len=arguments.prompt_tokens + arguments.output_tokens,
        max_num_seqs=arguments.requests,
        max_batch_tokens=arguments.max_batch_tokens,
        log_level="warning",
    )


def offline(arguments: argparse.Namespace, shard_set: ShardSet) -> dict[str, Any]:
    """What `mgtp bench` measures of the engine."""
    shape = arguments.prompt_tokens, arguments.output_tokens
    launch = launch_options(arguments)
    started = start_ranks(shard_set, launch)
    with started.group:
        found = Bench(started, shard_set, launch).run(BenchOptions([1], [], arguments.requests, *shape))
    assert found.throughput is not None
    return {
        "device": found.device,
        "decode_step_ms": round(found.decode[0].step_ms, 4),
        "offline_seconds": round(found.throughput.seconds, 3),
        "offline_first_token_s": round(found.throughput.median_first_token_s, 3),
        "offline_tokens_per_s": round(found.throughput.output_tokens_per_s, 1),
    }


def serve(arguments: argparse.Namespace, shard_set: ShardSet, sock: socket.socket) -> None:
    """The server's process."""
    logging.basicConfig(level=logging.WARNING)
    if arguments.front_only:
        group.RANK_MODULE = "token_rank"
    options = ServerOptions(max_num_seqs=arguments.requests)
    asyncio.run(Life({"model": shard_set}, launch_options(arguments), options, sock).run())


def online(arguments: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """What a client sees of a server in a process of its own."""
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, PORT_VARIABLE: str(sock.fileno()), "PYTHONPATH": paths}
    server = subprocess.Popen([sys.executable, *sys.argv], env=environment, pass_fds=[sock.fileno()])
    sock.close()
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/ready")
        return asyncio.run(Client(arguments, port, server.pid, vocab_size).run())
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            opener.open(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("error: the server did not get ready") from None
            time.sleep(0.1)


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client:
    """Sends what the engine was given, and notes when the answers come."""

    def __init__(self, arguments: argparse.Namespace, port: int, pid: int, vocab_size: int) -> None:
        self._arguments, self._port, self._pid, self._vocab_size = arguments, port, pid, vocab_size
        self._random = random.Random(1)

    async def run(self) -> dict[str, Any]:
        count, length = self._arguments.requests, self._arguments.output_tokens
        loop = asyncio.get_running_loop()
        streams = [(await loop.create_connection(Stream, "127.0.0.1", self._port))[1] for _ in range(count)]
        for stream in streams[:SINGLE_STREAMS]:  # what first requests set up is no one's figure
            await stream.ask(self._body())
        singles = [await streams[0].ask(self._body()) for _ in range(SINGLE_STREAMS)]
        steps = [b - a for times in singles for a, b in list(pairwise(times))[len(times) // 2 :]]
        bodies = [self._body() for _ in streams]
        front, own, begin = cpu_seconds(self._pid), time.process_time(), time.perf_counter()
        answers = await asyncio.gather(*(s.ask(body) for s, body in zip(streams, bodies, strict=True)))
        seconds = time.perf_counter() - begin
        tokens = count * length
        return {
            "server_seconds": round(seconds, 3),
            "server_first_token_s": round(statistics.median(times[0] for times in answers) - begin, 3),
            "server_tokens_per_s": round(tokens / seconds, 1),
            "single_median_ms": round(statistics.median(steps) * 1e3, 4),
            "single_mean_ms": round(statistics.mean(steps) * 1e3, 4),
            "front_us_per_token": round((cpu_seconds(self._pid) - front) / tokens * 1e6, 2),
            "front_busy": round((cpu_seconds(self._pid) - front) / seconds, 3),
            "client_busy": round((time.process_time() - own) / seconds, 3),
        }

    def _body(self) -> bytes:
        prompt = self._random.choices(range(self._vocab_size), k=self._arguments.prompt_tokens)
        tokens = self._arguments.output_tokens
        options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"prompt": prompt, "max_tokens": tokens, **options}).encode()


class Stream(asyncio.Protocol):
    """A connection that is kept; one request at a time. Does little with what comes, so that the server is the limit."""

    def __init__(self) -> None:
        self._tail, self._times = b"", list[float]()
        self._done: asyncio.Future[list[float]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, body: bytes) -> asyncio.Future[list[float]]:
        """When the events came, once all have."""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self._tail, self._times = b"", []
        self._wanted = json.loads(body)["max_tokens"]
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head.encode() + b"\r\n\r\n" + body)
        return self._done

    def data_received(self, data: bytes) -> None:
        if b'"text"' in data:
            self._times.append(time.perf_counter())
        self._tail = (self._tail + data)[-4096:]
        if self._tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and self._done is not None:
            found = re.findall(rb'"completion_tokens":(\d+)', self._tail)
            assert [int(n) for n in found] == [self._wanted], self._tail
            self._done.set_result(self._times)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the server has hung up: {self._tail!r}"))


if __name__ == "__main__":
    main()
