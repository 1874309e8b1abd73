"""The status page in a real browser: figures, bars, the chat box, the key; and the figures behind it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, find_browser
from tests.servers import ServerProcess, wait_for

LONG = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Skips where no browser is installed."""
    found = find_browser()
    if found is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: apt install chromium chromium-driver)")
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder, Browser(*found, Path(folder)) as browser:
        yield browser


def wait(check, seconds: float = 15) -> None:
    wait_for(lambda: check() or None, seconds)


def test_figures_and_bars(browser, server):
    browser.open(server.url)
    wait(lambda: browser.text("#status") == "ready")
    assert browser.text("#model") == "tiny" and browser.run("return document.title") == "mgtp: tiny"
    assert browser.text("#running") == "0"
    with server.http.stream("POST", "/v1/completions", json=LONG):
        wait(lambda: browser.text("#running") == "1" and browser.text("#speed") not in ("–", "0"))
    wait(lambda: browser.text("#running") == "0")
    ranks = browser.run("return [...document.querySelectorAll('.rank')].map((row) => row.innerText)")
    assert [text[:6] for text in ranks] == ["0: cpu", "1: cpu"]
    assert all("weights" in text and "in use" in text for text in ranks)
    widths = browser.run("return [...document.querySelectorAll('.track i')].map((bar) => bar.offsetWidth)")
    assert len(widths) == 4 and all(width > 0 for width in widths)
    overflow = browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    assert browser.log() == []


def test_chat_box(browser, server, tmp_path):
    browser.open(server.url)
    wait(lambda: browser.text("#status") == "ready")
    for _ in range(9):  # a model of random weights may have little to say, or nothing that can be seen
        browser.click("#clear")
        browser.type("#ask input", "<b>hello</b>")
        browser.click("#ask button")
        wait(lambda: len(browser.text("#chat .assistant")) > 5 or browser.run("return running === null"))
        if len(browser.text("#chat .assistant")) > 5:
            break
    assert len(browser.text("#chat .assistant")) > 5
    assert browser.text("#chat .user") == "<b>hello</b>"  # text, not markup
    assert browser.run("return document.querySelector('#ask input').value") == ""
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    browser.click("#clear")
    assert browser.run("return document.querySelectorAll('#chat p').length") == 0
    server.wait_until_idle()
    # The conversation goes on: what was said is sent again.
    for text in ("one", "two"):
        browser.type("#ask input", text)
        browser.click("#ask button")
        wait(lambda: browser.run("return running !== null") or len(browser.text("#chat")) > 10)
        browser.run("running?.abort()")
        wait(lambda: browser.run("return running === null"))
    assert browser.run("return messages.map((m) => m.role)") == ["user", "assistant"] * 2
    server.wait_until_idle()
    assert browser.log() == []


def test_errors_and_a_server_that_goes_away(browser, run_folder, served_checkpoint, sharded, tmp_path):
    """And which of two models is asked."""
    model = sharded(served_checkpoint, 1)
    options = ("--max-model-len", "128", "--max-num-seqs", "1", "--served-model-name", "one", "--model", f"two={model}")
    server = ServerProcess(run_folder, model, *options, MGTP_API_KEY="secret")
    server.http.headers["authorization"] = "Bearer secret"
    browser.open(server.url)
    wait(lambda: browser.text("#status") == "needs a key")
    browser.type("#key input", "secret")
    browser.click("#key button")
    wait(lambda: browser.text("#status") == "ready")
    assert browser.run("return document.querySelector('#key').offsetHeight") == 0
    assert browser.text("#model") == "one, two"
    assert browser.run("return [...document.querySelectorAll('.rank')].map((row) => row.innerText)[1]").startswith(
        "two 0: "
    )
    browser.type("#choice", "two")
    browser.type("#ask input", "hi")
    browser.click("#ask button")
    wait(lambda: server.metric('mgtp_prompt_tokens_total{model="two"}') > 0)
    assert server.metric('mgtp_prompt_tokens_total{model="one"}') == 0
    wait(lambda: browser.run("return running === null"))
    browser.run("document.querySelector('#chat').scrollIntoView()")
    browser.type("#ask input", "x" * 200)
    browser.click("#ask button")
    wait(lambda: "leave no room in the context of 128 tokens" in browser.text("#chat .error"))
    browser.screenshot(tmp_path / "page.png")
    assert server.stop() == 0
    wait(lambda: browser.text("#status") == "not reachable")


def test_memory_is_that_of_now(server):
    """Asked of the ranks at every look, not what they said when they were ready."""
    server.http.get("/metrics")
    name = 'mgtp_rank_private_bytes{device="cpu",model="tiny",rank="1"}'
    wait(lambda: name in server.http.get("/metrics").text)
    ranks = server.http.get("/status").json()["ranks"]
    assert [r["rank"] for r in ranks] == [0, 1]
    assert all(10 << 20 < r["private_bytes"] < r["device_used_bytes"] < r["device_total_bytes"] for r in ranks)
    used = 'mgtp_rank_device_bytes{device="cpu",kind="used",rank="1"}'
    first = server.metric(used)  # of the whole host, which is never still
    wait(lambda: server.metric(used) != first)


def test_metrics_cover_what_is_worth_watching(server):
    server.complete(prompt="abc", max_tokens=4, ignore_eos=True)
    page = server.http.get("/metrics").text
    for name in (
        "requests_total", "sequences", "sequences_finished_total", "queue_seconds_bucket", "prompt_tokens_total",
        "time_to_first_token_seconds_bucket", "time_between_tokens_seconds_bucket", "generated_tokens_total",
        "kv_blocks", "prefix_cache_hit_tokens", "preemptions", "rank_weight_bytes", "rank_device_bytes",
        "step_seconds_bucket", "collective_backend_info", "restarts_total",
    ):  # fmt: skip
        assert any(line.startswith(f"mgtp_{name}") and "# " not in line for line in page.splitlines()), name
