"""A headless Chromium, driven through chromedriver's HTTP interface: what the W3C calls WebDriver."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--no-first-run", "--window-size=1000,900"),
]
START_SECONDS = 60
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's own name for references


def find_browser() -> tuple[str, str] | None:
    """(chromium, chromedriver), None where one of them is missing."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    return (found, driver) if found and driver else None


class Browser:
    """One window. Use as a context manager; selectors are CSS."""

    def __init__(self, chromium: str, chromedriver: str, folder: Path) -> None:
        """`folder` holds the browser's profile."""
        self._driver = subprocess.Popen([chromedriver, "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            address = f"http://127.0.0.1:{self._read_port()}"
            self._http = httpx.Client(base_url=address, timeout=START_SECONDS, trust_env=False)
            arguments = [*FLAGS, f"--user-data-dir={folder}"]
            options = {"binary": chromium, "args": arguments}
            logs = {"browser": "ALL"}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
            session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{session['sessionId']}"
        except BaseException:
            self._driver.kill()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._http.delete(self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def _read_port(self) -> str:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                return found.group(1)
        raise AssertionError("chromedriver has ended")

    def open(self, url: str) -> None:
        """Load a page."""
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns; `arguments` are its arguments."""
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text that an element shows, none where there is no such element yet."""
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self._post(f"{self._element(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Click an element."""
        self._post(f"{self._element(selector)}/click", {})

    def screenshot(self, path: Path) -> None:
        """Save what the window shows."""
        path.write_bytes(base64.b64decode(self._get(f"{self._session}/screenshot")))

    def log(self) -> list[str]:
        """What the page has reported since the last call: errors, and whatever its policy has blocked."""
        return [entry["message"] for entry in self._post(f"{self._session}/se/log", {"type": "browser"})]

    def _element(self, selector: str) -> str:
        found = self._post(f"{self._session}/element", {"using": "css selector", "value": selector})
        return f"{self._session}/element/{found[ELEMENT]}"

    def _get(self, path: str) -> Any:
        return self._value(self._http.get(path))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._value(self._http.post(path, json=body))

    def _value(self, answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]
