"""Random kills of a server under load, with `--restart on-failure`: every answer exact or an error, none hanging, and the
server back each time."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import httpx

from tests.processes import rank_pids, run_folders
from tests.servers import ServerProcess, wait_for

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGTERM)
BACK_SECONDS = 120
REQUEST_SECONDS = 120
MAX_TOKENS = 40


class Load:
    """Clients that ask one after another until told to stop; each answer is compared with the expected text."""

    def __init__(self, url: str, expected: dict[str, str], clients: int = 3) -> None:
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self.exact = self.errors = 0
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=[random.Random(i)]) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, choose: random.Random) -> None:
        with httpx.Client(base_url=self._url, timeout=REQUEST_SECONDS, trust_env=False) as http:
            while not self._stop.is_set():
                prompt = choose.choice(list(self._expected))
                try:
                    answer = http.post("/v1/completions", json=request(prompt))
                except httpx.HTTPError as error:
                    self._note(f"{type(error).__name__}: {error}")  # the front lives: it has to answer
                    continue
                if answer.status_code == 200:
                    text = answer.json()["choices"][0]["text"]
                    self._note("" if text == self._expected[prompt] else f"{prompt}: {text!r}")
                elif answer.status_code == 503:
                    with self._lock:
                        self.errors += 1
                    time.sleep(0.2)
                else:
                    self._note(f"{answer.status_code} {answer.text}")

    def _note(self, wrong: str) -> None:
        with self._lock:
            if wrong:
                self.wrong.append(wrong)
            else:
                self.exact += 1

    def stop(self) -> None:
        """End the clients; none may hang."""
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS + 10)
            assert not thread.is_alive(), "a request hangs"


def request(prompt: str) -> dict:
    """The body of a request whose answer is always the same."""
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


def kill_again_and_again(kills: int, seed: int, shard_set: str) -> None:
    """Kill a random rank at a random moment, `kills` times, every second time during the restart after the first.

    Each way to kill is taken once in four times.
    """
    choose = random.Random(seed)
    ways = [way for _ in range(0, kills, len(SIGNALS)) for way in choose.sample(SIGNALS, len(SIGNALS))]
    limit = ("--restart", "on-failure", "--max-restarts", str(10 * kills), "--step-timeout", "20")
    with run_folders() as folder:
        server = ServerProcess(folder, shard_set, *limit, module="tests.restless_front")
        prompts = ("a", "bc", "def")
        expected = {p: server.complete(**request(p))["choices"][0]["text"] for p in prompts}
        load = Load(server.url, expected)
        try:
            for number, way in enumerate(ways[:kills]):
                time.sleep(choose.uniform(0, 1.5))
                pids = rank_pids(folder)
                if pids:
                    try:
                        os.kill(choose.choice(pids), way)
                    except ProcessLookupError:
                        pass
                wait_for(lambda: server.http.get("/health").status_code == 200 or None, 5, server.process)
                if number % 2:
                    wait_until_back(server)
            wait_until_back(server)
            before = load.exact
            wait_for(lambda: load.exact > before or None, REQUEST_SECONDS, server.process)
        finally:
            load.stop()
        assert not load.wrong, load.wrong[:5]
        assert load.exact > 0
        print(f"{kills} kills: {load.exact} exact answers, {load.errors} errors")
        assert server.stop() == 0


def wait_until_back(server: ServerProcess) -> None:
    """The failure has been noticed (or is about to be), and the server is ready again."""
    time.sleep(1)
    wait_for(lambda: server.http.get("/ready").status_code == 200 or None, BACK_SECONDS, server.process)
