"""Running `mgtp` as users do, within limits, and knowing what of it is left. Needs no packages."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "MGTP_MULTI_GPU"
"""Environment variable by which processes of a run are known."""


class Overrun(Exception):
    """A part has used up its time."""


@dataclass
class Run:
    """A command: what it was given, how it ended, how long it took, what it printed."""

    arguments: list[str]
    exit_code: int
    seconds: float
    output: Any
    stderr: list[str]

    def document(self) -> dict[str, Any]:
        """For the JSON document; of long outputs the figures are elsewhere."""
        return {**vars(self), "arguments": " ".join(self.arguments)}

    def checked(self, code: int = 0) -> Any:
        """The output; raises RuntimeError for another exit code."""
        if self.exit_code != code:
            raise RuntimeError(
                f"{' '.join(self.arguments)}: exit code {self.exit_code}: {' | '.join(self.stderr[-3:])}"
            )
        return self.output


class Started:
    """A command that runs, and what it has printed so far."""

    def __init__(self, mgtp: Sequence[str], arguments: Sequence[str], folder: Path) -> None:
        self.arguments, self.folder, self.begin = list(arguments), folder, time.monotonic()
        environment = {**os.environ, MARK: str(folder), "TMPDIR": str(folder)}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*mgtp, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
            )

    def wait(self, seconds: float) -> Run:
        """The end; what has not ended within `seconds` is killed, its ranks with it."""
        try:
            code = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        seconds = round(time.monotonic() - self.begin, 2)
        text = (self.folder / "out").read_text(errors="replace")
        try:
            output = json.loads(text)
        except ValueError:
            output = text[-2000:]
        return Run(self.arguments, code, seconds, output, self.log()[-8:])

    def log(self) -> list[str]:
        """Lines on stderr so far."""
        return (self.folder / "err").read_text(errors="replace").splitlines()

    def pids(self) -> dict[int, int | None]:
        """Processes of this command that are there: process id -> rank, None for others."""
        mark, found = f"{MARK}={self.folder}".encode(), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if mark in variables:
                    rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
                    found[int(entry.name)] = None if rank is None else int(rank)
        return found


@dataclass
class Commands:
    """Starts commands for one part after the other. `place`: options of commands that start ranks; `end`: by the clock."""

    mgtp: list[str]
    device: str
    place: list[str]
    work: Path
    end: float = 0.0
    runs: list[Run] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)

    def left(self) -> float:
        """Seconds that the part has left; raises Overrun when there are none."""
        seconds = self.end - time.monotonic()
        if seconds <= 0:
            raise Overrun("no time left for this part")
        return seconds

    def start(self, *arguments: str) -> Started:
        """Start `mgtp` with `arguments`. Its folder has a short path, for the sockets in it."""
        started = Started(self.mgtp, arguments, Path(tempfile.mkdtemp(dir=self.work)))
        self.started.append(started)
        return started

    def finish(self, started: Started, limit: float = 1e9) -> Run:
        """Wait for the end, at most `limit` seconds from now and no longer than the part may take."""
        run = started.wait(min(limit, self.left()))
        said = " ".join(Path(a).name if a.startswith("/") else a for a in run.arguments)
        print(f"  {run.seconds:6.1f} s, code {run.exit_code}: mgtp {said:.150}", flush=True)
        self.runs.append(run)
        return run

    def run(self, *arguments: str, limit: float = 1e9) -> Run:
        """`start` and `finish`."""
        return self.finish(self.start(*arguments), limit)

    def run_all(self, commands: Sequence[Sequence[str]]) -> list[Run]:
        """Several commands at the same time."""
        return [self.finish(started) for started in [self.start(*arguments) for arguments in commands]]

    def stop_all(self) -> None:
        """End what a part has left running."""
        for started in self.started:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait()
        self.started.clear()

    @contextmanager
    def server(self, *arguments: str) -> Iterator[Server]:
        """`mgtp serve` with `arguments`, ready."""
        server = Server(self, self.start("serve", *arguments, "--port", "0", *self.place))
        try:
            yield server
        finally:
            if server.started.process.poll() is None:
                server.started.process.kill()
            self.runs.append(server.started.wait(5))


@dataclass
class Stream:
    """One answer as it came: seconds until the first token and until the end, and its ids."""

    first: float = 0.0
    seconds: float = 0.0
    ids: list[int] = field(default_factory=list)
    error: str = ""


class Server:
    """A server that is ready, and what one asks of it."""

    def __init__(self, commands: Commands, started: Started) -> None:
        self.commands, self.started = commands, started
        line = self._wait(lambda: next((line for line in started.log() if "listening on " in line), None))
        self.address = line.rsplit("/", 1)[1].rstrip('"}')
        self._wait(lambda: self._get("/ready") == 200 or None)
        self.ready_seconds = round(time.monotonic() - started.begin, 2)

    def stream(self, prompt: Sequence[int], max_tokens: int, stream: Stream | None = None) -> Stream:
        """A greedy completion of exactly `max_tokens`, as it comes."""
        stream = stream or Stream()
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        begin = time.monotonic()
        connection = http.client.HTTPConnection(self.address, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    stream.error = stream.error or str(event.get("error", ""))
                    for choice in event.get("choices", ()):
                        stream.ids += choice.get("token_ids") or []
                    stream.first = stream.first or (time.monotonic() - begin if stream.ids else 0.0)
        except (OSError, http.client.HTTPException) as error:
            stream.error = repr(error)
        stream.seconds = time.monotonic() - begin
        connection.close()
        return stream

    def streams(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[Stream], list[threading.Thread]]:
        """All at the same time, in threads that have been started."""
        streams = [Stream() for _ in prompts]
        threads = [
            threading.Thread(target=self.stream, args=(prompt, max_tokens, stream), daemon=True)
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        for thread in threads:
            thread.start()
        return streams, threads

    def under_load(self, count: int) -> list[threading.Thread]:
        """The threads of `count` long streams, once all of them have had tokens."""
        prompts = [[i + 3, *range(3, 40)] for i in range(count)]
        streams, threads = self.streams(prompts, 4000)
        self._wait(lambda: all(s.ids or s.error for s in streams) or None)
        return threads

    def _get(self, path: str) -> int:
        connection = http.client.HTTPConnection(self.address, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def _wait(self, check: Callable[[], Any]) -> Any:
        while (value := check()) is None:
            if self.started.process.poll() is not None:
                raise RuntimeError(f"the server has ended: {' | '.join(self.started.log()[-3:])}")
            self.commands.left()
            time.sleep(0.02)
        return value


def end_and_watch(started: Started, pid: int, number: signal.Signals, before: Sequence[int]) -> dict[str, Any]:
    """Send a signal and see how long processes and GPU memory (MiB) stay, 15 seconds at most.

    A card counts as given back when no more is in use than `before`, less a little for the driver.
    """
    begin = time.monotonic()

    def seconds_until(check: Callable[[], bool]) -> float | None:
        while time.monotonic() - begin < 15:
            if check():
                return round(time.monotonic() - begin, 2)
            time.sleep(0.01)
        return None

    def are_gone() -> bool:
        return started.process.poll() is not None and not started.pids()

    def is_given_back() -> bool:
        return all(now["used_mib"] <= was + 32 for now, was in zip(cards(), before, strict=True))

    os.kill(pid, number)
    gone, given_back = seconds_until(are_gone), seconds_until(is_given_back)
    return {
        "signal": number.name, "to_rank": pid != started.process.pid, "exit_code": started.process.poll(),
        "processes_gone_s": gone, "memory_back_s": given_back, "used_mib_before": list(before),
        "used_mib_after": [c["used_mib"] for c in cards()], "stderr": started.log()[-4:],
    }  # fmt: skip


def cards() -> list[dict[str, Any]]:
    """Every GPU: name, memory in all and in use in MiB, driver; nothing without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [{"name": n, "total_mib": int(t), "used_mib": int(u), "driver": d} for n, t, u, d in rows]
