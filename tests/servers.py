"""A server as users start it, on a free port, and what tests ask it."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.processes import assert_nothing_left, start

START_SECONDS = 60


class ServerProcess:
    """`mgtp serve`, its run folders under `folder`. Its log is collected while it runs."""

    def __init__(self, folder: Path, shard_set: str, *options: str, wait: bool = True, **environment: str) -> None:
        self.folder = folder
        arguments = ("serve", shard_set, "--port", "0", "--device", "cpu", *options)
        self.process = start(folder, *arguments, **environment)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()
        try:
            self.url = self.wait_for_line("listening on ").rsplit(" ", 1)[1].rstrip('"}')
            self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
            if wait:
                self.wait_until_ready()
        except BaseException:
            self.process.kill()
            print(*self.log, sep="\n")
            raise

    def _collect(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))

    def wait_for_line(self, text: str) -> str:
        """The first line of the log with `text`."""
        return wait_for(lambda: next((line for line in self.log if text in line), None), START_SECONDS, self.process)

    def wait_until_ready(self) -> None:
        """Wait for /ready."""
        wait_for(lambda: self.http.get("/ready").status_code == 200 or None, START_SECONDS, self.process)

    @property
    def model(self) -> str:
        """The name of the served model."""
        return self.http.get("/v1/models").json()["data"][0]["id"]

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """POST a document."""
        return self.http.post(path, json=body, headers=headers)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must be one."""
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """The documents of a stream, which must end with [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        """A value of /metrics, by name and some or all of its labels: the sum of those that match."""
        wanted, _, labels = name.partition("{")
        found = [
            float(value)
            for line in self.http.get("/metrics").text.splitlines()
            for key, _, value in [line.rpartition(" ")]
            if key.partition("{")[0] == wanted and set(_labels(labels)) <= set(_labels(key.partition("{")[2]))
        ]
        assert found, f"no metric {name}"
        return sum(found)

    def wait_until_idle(self, seconds: float = 10) -> None:
        """Wait until nothing runs, and all blocks are free."""
        wait_for(lambda: self._is_idle() or None, seconds, self.process)

    def _is_idle(self) -> bool:
        names = ('mgtp_sequences{state="running"}', 'mgtp_sequences{state="waiting"}', 'mgtp_kv_blocks{state="used"}')
        return all(self.metric(name) == 0 for name in names)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal and wait for the end; the exit code. Nothing may be left."""
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 30) -> int:
        """Wait for the end by itself; the exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(5)
        self.http.close()
        assert not any("Traceback" in line or "ResourceWarning" in line for line in self.log), self.log
        assert_nothing_left(self.folder)
        return code


def _labels(text: str) -> list[str]:
    """'a="1",b="2"}' as its parts."""
    return [part for part in text.rstrip("}").split(",") if part]


def wait_for(check: Callable[[], Any], seconds: float, process: subprocess.Popen[str] | None = None) -> Any:
    """What `check` gives as soon as it is not None; fails after `seconds`, or when `process` has ended."""
    deadline = time.monotonic() + seconds
    while True:
        ended = process is not None and process.poll() is not None
        value = check()
        if value is not None:
            return value
        assert not ended, f"the process has ended with code {process.returncode if process else None}"
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
