"""Several models by name, and /admin/: what is served changes as a whole or not at all, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import mgtp_here, rank_pids, run_folders
from tests.servers import ServerProcess, wait_for

LONG = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "y", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def root(served_checkpoint, tiny_checkpoint, sharded, tmp_path_factory) -> Path:
    """A model root with two good sets and everything that must be refused."""
    root = tmp_path_factory.mktemp("models")
    outside = root.parent / f"{root.name}-outside"
    shutil.copytree(sharded(served_checkpoint, 1), root / "one")
    shutil.copytree(sharded(tiny_checkpoint("qwen2_qkvbias"), 2), root / "deep" / "two")
    shutil.copytree(root / "one", outside)
    (root / "escape").symlink_to(outside)
    (root / "inside").symlink_to(root / "one")
    (root / "loop").symlink_to("loop")
    shutil.copytree(root / "one", root / "leaky")
    weights = next((root / "leaky").glob("*.safetensors"))
    weights.unlink()
    weights.symlink_to(outside / weights.name)
    shutil.copytree(root / "one", root / "short")
    weights = next((root / "short").glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1)
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def server(root) -> Iterator[ServerProcess]:
    """Serves 'main' (set one) and 'other' (set two); every test finds it so, and leaves it so."""
    with run_folders() as folder:
        limits = ("--request-timeout", "6", "--drain-timeout", "0.3", "--max-num-seqs", "8")
        models = ("--served-model-name", "main", "--model", f"other={root / 'deep' / 'two'}")
        admin = ("--admin", "--model-root", str(root))
        server = ServerProcess(folder, str(root / "one"), *limits, *models, *admin, wait=False, MGTP_API_KEY="secret")
        server.http.headers["authorization"] = "Bearer secret"
        server.wait_until_ready()
        yield server
        print(*server.log[-40:], sep="\n")
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def texts(server) -> dict[str, str]:
    """What each model says to SHORT."""
    return {name: text_of(server, name) for name in ("main", "other")}


def client(server: ServerProcess) -> httpx.Client:
    """A client for another thread."""
    return httpx.Client(base_url=server.url, timeout=120, trust_env=False, headers={"authorization": "Bearer secret"})


def text_of(server: ServerProcess, model: str | None) -> str:
    return server.complete(**SHORT, model=model)["choices"][0]["text"]


def served(server: ServerProcess) -> list[str]:
    return [model["id"] for model in server.http.get("/v1/models").json()["data"]]


def admin(server: ServerProcess, what: str, status: int = 200, **body: Any) -> dict[str, Any]:
    headers = {"content-type": "application/json"}  # httpx's own way cannot send half a surrogate
    answer = server.http.post(f"/admin/{what}", content=json.dumps(body), headers=headers, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def wait_for_pids(server: ServerProcess, check: Callable[[set[int]], bool]) -> set[int]:
    """The ranks' processes, as soon as they are as they should be."""

    def pids() -> set[int] | None:
        found = set(rank_pids(server.folder))
        return found if check(found) else None

    return wait_for(pids, 30, server.process)


def stream_in_background(server: ServerProcess, **body: Any) -> tuple[threading.Thread, list[str]]:
    """A stream that has begun, and its lines, all of them once the thread has ended."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        asked = {**LONG, **body, "stream": True}
        with client(server) as http, http.stream("POST", "/v1/completions", json=asked) as answer:
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(10)
    return thread, lines


def error_of(line: str) -> dict[str, Any]:
    return json.loads(line.removeprefix("data: "))["error"]


def test_models_by_name(server, texts):
    """Each answers as itself, also when both are asked at once; the first is meant when none is named."""
    assert served(server) == ["main", "other"]
    assert texts["main"] != texts["other"]
    assert text_of(server, None) == texts["main"]
    found: list[tuple[str, str]] = []
    names = ["main", "other"] * 6
    threads = [threading.Thread(target=lambda n=name: found.append((n, text_of(server, n)))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == sorted((name, texts[name]) for name in names)
    error = server.post("/v1/completions", {**SHORT, "model": "Main"})
    assert error.status_code == 404 and "'main', 'other' are" in error.json()["error"]["message"]
    assert server.http.get("/v1/models/other").json()["max_model_len"] == 256
    assert server.post("/tokenize", {"prompt": "abc", "model": "other"}).json()["max_model_len"] == 256


def test_figures_of_each(server, texts):
    server.wait_until_idle()
    assert server.metric('mgtp_generated_tokens_total{model="other"}') > 0
    assert server.metric('mgtp_rank_weight_bytes{model="other",rank="1"}') > 0
    status = server.http.get("/status").json()
    assert [model["name"] for model in status["models"]] == ["main", "other"]
    assert [rank["model"] for rank in status["ranks"]] == ["main", "other", "other"]
    assert status["generated_tokens"] == sum(model["generated_tokens"] for model in status["models"])


def test_needs_the_key(server):
    """And the guide names these paths, and no other."""
    guide = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert set(re.findall(r"/admin/([a-z-]+)", guide)) == {"load", "unload", "replace", "clear-cache"}
    for path in ("load", "unload", "replace", "clear-cache"):
        assert server.http.post(f"/admin/{path}", json={}, headers={"authorization": ""}).status_code == 401


def test_paths_stay_below_the_root(server, root):
    """Neither dots nor links nor spelling lead out, and nothing has been started or opened for any of them."""
    before = rank_pids(server.folder)
    name = root.name
    for path in (f"../{name}/one", "../" * 20 + "etc", str(root / "one"), "deep/../one", "..", ".", "", "one\0"):
        assert "model root" in admin(server, "load", 400, path=path, model="x")["message"], path
    for path in ("escape", "leaky"):
        assert "leads out of the model root" in admin(server, "replace", 400, path=path)["message"]
    for path in ("nowhere", "loop", "one/plan.json", "ONE", "~", "x" * 5000, "\ud800"):
        assert "no folder" in admin(server, "load", 404, path=path)["message"], path
    assert "not a shard set" in admin(server, "load", 400, path="empty")["message"]
    assert rank_pids(server.folder) == before
    assert served(server) == ["main", "other"]


def test_names_can_be_printed(server):
    """They stand in URLs, logs and metrics."""
    for name in ("a\nb", "\x1b[31m", "x" * 201, ""):
        error = admin(server, "load", 400, path="inside", model=name)
        assert error["param"] == "model" and "\n" not in error["message"]
    assert served(server) == ["main", "other"]


def test_load_and_unload(server, texts):
    before = set(rank_pids(server.folder))
    assert "already" in admin(server, "load", 409, path="one", model="main")["message"]
    loaded = admin(server, "load", path="inside")
    assert loaded["model"]["id"] == "inside" and served(server) == ["main", "other", "inside"]
    assert text_of(server, "inside") == texts["main"]
    thread, lines = stream_in_background(server, model="inside")
    assert admin(server, "unload", model="inside") == {"model": "inside", "sequences_cut": 1}
    thread.join(10)
    assert error_of(lines[-1])["message"] == "the model was unloaded"
    assert set(rank_pids(server.folder)) == before
    assert 'model="inside",rank' not in server.http.get("/metrics").text
    assert server.post("/v1/completions", {**SHORT, "model": "inside"}).status_code == 404
    assert admin(server, "unload", 404, model="inside")["code"] == "model_not_found"


def test_replacing_under_load(server, root, texts):
    """No request fails, each is answered by the one model or the other; one that goes on keeps its time limit."""
    before = set(rank_pids(server.folder))
    thread, lines = stream_in_background(server, model="main")
    answers: list[str] = []
    is_over = threading.Event()

    def ask() -> None:
        with client(server) as http:
            while not is_over.is_set():
                answer = http.post("/v1/completions", json={**SHORT, "model": "main"})
                answers.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        assert admin(server, "replace", path="deep/two", model="main")["how"] == "beside"
        assert text_of(server, "main") == texts["other"]
        thread.join(15)
        wait_for_pids(server, lambda pids: len(pids) == 4 and len(pids & before) == 2)
    finally:
        is_over.set()
        asker.join(30)
    assert error_of(lines[-1])["code"] == "timeout"
    assert set(answers) == {texts["main"], texts["other"]}
    assert served(server) == ["main", "other"]
    admin(server, "replace", path="one", model="main")
    assert text_of(server, "main") == texts["main"]


def test_a_replacement_that_fails(server, texts):
    """A bad set touches nothing; ranks that die on their way leave the old model, or a clear state that load ends."""
    assert "short" in admin(server, "replace", 400, path="short", model="main")["message"]
    admin(server, "unload", model="other")
    error = fail_while_starting(server, in_place=False)
    assert "rank 0 was killed by SIGKILL" in error["message"]
    assert text_of(server, "main") == texts["main"]
    thread, lines = stream_in_background(server, model="main")
    fail_while_starting(server, in_place=True)
    thread.join(10)
    assert error_of(lines[-1])["message"] == "the model was replaced"
    assert served(server) == [] and rank_pids(server.folder) == []
    assert server.http.get("/health").json() == {"status": "no model loaded"}
    ready = server.http.get("/ready")
    assert ready.status_code == 503 and ready.json() == {"status": "no model loaded"}
    refused = server.post("/v1/completions", SHORT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_model"
    assert refused.headers["retry-after"]
    assert server.http.get("/status").json()["model"] is None
    admin(server, "load", path="one", model="main")
    admin(server, "load", path="deep/two", model="other")
    assert {name: text_of(server, name) for name in served(server)} == texts
    assert server.http.get("/ready").status_code == 200


def test_the_default_model_is_never_another_by_accident(server, texts):
    """After a replacement in place that failed, requests that name none are refused; unloading passes the place on."""
    fail_while_starting(server, in_place=True)
    assert served(server) == ["other"]
    refused = server.post("/v1/completions", SHORT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_model"
    assert "'main' is not loaded, name another: 'other'" in refused.json()["error"]["message"]
    assert text_of(server, "other") == texts["other"]
    admin(server, "load", path="one", model="main")
    assert text_of(server, None) == texts["main"]
    admin(server, "unload", model="main")
    assert text_of(server, None) == texts["other"]
    admin(server, "load", path="one", model="main")
    assert text_of(server, None) == texts["other"]
    admin(server, "unload", model="other")  # as it was found
    admin(server, "load", path="deep/two", model="other")
    assert text_of(server, None) == texts["main"] and served(server) == ["main", "other"]


def test_a_failure_names_the_model(run_folder, root):
    """Where there are several."""
    server = ServerProcess(run_folder, str(root / "one"), "--model", f"other={root / 'deep' / 'two'}")
    pid = next(
        pid
        for pid in rank_pids(run_folder)
        if b"WORLD_SIZE=2" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    os.kill(pid, signal.SIGKILL)
    assert server.wait() == 5
    assert any(re.match(r"error: model 'other': rank . was killed by SIGKILL", line) for line in server.log)


def fail_while_starting(server: ServerProcess, *, in_place: bool) -> dict[str, Any]:
    """Replace main, and kill the first rank of its successor as soon as it is there; a second change is refused."""
    before = set(rank_pids(server.folder))
    answers: list[httpx.Response] = []
    body = {"path": "one", "model": "main", "in_place": in_place}

    def replace() -> None:
        with client(server) as http:
            answers.append(http.post("/admin/replace", json=body))

    thread = threading.Thread(target=replace)
    thread.start()
    new = wait_for_pids(server, lambda pids: bool(pids - before)) - before
    with client(server) as http:
        refused = http.post("/admin/load", json={"path": "one", "model": "more"})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "busy"
    for pid in new:
        os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert answers[0].status_code == 500
    return answers[0].json()["error"]


def test_clear_cache(server):
    """A prompt that has been seen is found again, and after clear-cache it is not."""
    prompt = "the same beginning, and long enough for a block or two of the cache"

    def hits() -> float:
        server.complete(prompt=prompt, max_tokens=1, model="main")
        server.wait_until_idle()
        return server.metric('mgtp_prefix_cache_hit_tokens{model="main"}')

    first, second = hits(), hits()
    assert second > first
    assert admin(server, "clear-cache") == {"models": ["main", "other"]}
    assert hits() == second
    assert admin(server, "clear-cache", model="main") == {"models": ["main"]}
    assert admin(server, "clear-cache", 404, model="nobody")["param"] == "model"


def test_options(root, monkeypatch):
    """What cannot be is refused before a port is bound or a rank is started."""
    for arguments, said in (
        (["--admin", "--model-root", str(root)], "--admin needs a key"),
        (["--admin", "--api-key", "k"], "--admin needs --model-root"),
        (["--admin", "--api-key", "k", "--model-root", "/nowhere"], "--model-root /nowhere is not a folder"),
        (["--model-root", str(root)], "no effect without --admin"),
        (["--model", "x"], "--model 'x' is not NAME=DIR"),
        (["--model", "one=x"], "two models are named 'one'"),
        (["--model", "a=x", "--model", "a=y"], "two models are named 'a'"),
        (["--model", "a\nb=x"], "'a\\nb' is not printable"),
        (["--served-model-name", "x" * 201], "1 to 200 characters"),
        (["--served-model-name", ""], "1 to 200 characters"),
        (["--api-key", " \n"], "the API key is empty"),
    ):
        error = mgtp_here("serve", str(root / "one"), *arguments, "--device", "cpu", code=2).err
        assert said in error and "hint: " in error
    # A variable that was to be filled: nobody would be asked for a key.
    monkeypatch.setenv("MGTP_API_KEY", "")
    assert "the API key is empty" in mgtp_here("serve", str(root / "one"), "--device", "cpu", code=2).err
