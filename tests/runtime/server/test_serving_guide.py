"""docs/serving.md: its examples run against a server, its options and paths exist. And the other ways to look at one."""

from __future__ import annotations

import configparser
import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import mgtp

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    """The guide's fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("script", blocks("sh"))
def test_shell_examples(server, script):
    run = subprocess.run(
        ["bash", "-euc", script.replace(ADDRESS, server.url)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert '"choices"' in run.stdout and '"error"' not in run.stdout


@pytest.mark.parametrize("script", blocks("python"))
def test_python_examples(server, script):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(script.replace(ADDRESS, server.url), "serving.md", "exec"), {})
    assert out.getvalue()


def test_units_and_manifests():
    """Their options are options of serve, and their probes ask what there is."""
    import yaml

    from mgtp.cli.app import main

    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string(blocks("ini")[0])
    manifest = yaml.safe_load(blocks("yaml")[0])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["serve", "--help"]) == 0
    for arguments in (shlex.split(unit["Service"]["ExecStart"]), manifest["args"]):
        used = [each for each in arguments if each.startswith("--")]
        assert used and all(each in out.getvalue() for each in used)
    assert manifest["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert manifest["livenessProbe"]["httpGet"]["path"] == "/health"


def test_paths_of_the_table_exist(server):
    table = GUIDE.split("## Paths")[1].split("## Parameters")[0]
    for path in re.findall(
        r"`(/[^`]*)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    ):
        assert server.http.get(path).status_code in (200, 405), path


def test_parameters_of_the_table_exist():
    from mgtp.runtime.server.protocol import ChatRequest, CompletionRequest

    section = GUIDE.split("## Parameters")[1].split("* Defaults")[0]
    table = "".join(line for line in section.splitlines(keepends=True) if line.startswith("|"))
    named = {name.split(".")[0] for name in re.findall(r"`([a-z_.]+)`", table)}
    assert named == set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)


def test_status_page(server):
    """Self-contained: nothing is loaded from elsewhere."""
    answer = server.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", answer.text)
    assert "//" not in re.sub(r"//www\.w3\.org", "", answer.headers["content-security-policy"])
    status = server.http.get("/status").json()
    assert status["status"] == "ready" and status["model"] == "tiny"
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert all(0 < rank["weight_bytes"] < rank["device_total_bytes"] for rank in status["ranks"])


def test_metrics(server):
    before = server.metric("mgtp_generated_tokens_total")
    server.complete(prompt="abc", max_tokens=7, temperature=0, ignore_eos=True)
    assert server.metric("mgtp_generated_tokens_total") == before + 7
    server.wait_until_idle()
    assert server.metric('mgtp_collective_backend_info{axis="tp",backend="host",size="2"}') == 1
    assert server.metric("mgtp_step_seconds_count") > 0
    assert server.metric("mgtp_queue_seconds_count") > 0
    prompt = "the same beginning, and long enough for a block or two of the cache"
    hits = 0.0
    for _ in range(2):
        hits = server.metric("mgtp_prefix_cache_hit_tokens")
        server.complete(prompt=prompt, max_tokens=1)
        server.wait_until_idle()
    assert server.metric("mgtp_prefix_cache_hit_tokens") > hits


def test_chat_command(server, run_folder):
    """One line of input after the other; after /clear the same question has the same answer."""
    command = [sys.executable, "-m", "mgtp.cli", "chat", server.url, "--temperature", "0", "--max-tokens", "8"]
    run = subprocess.run(command, input="hello\n/clear\nhello\n", capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    half = len(run.stdout) // 2
    assert run.stdout[:half] == run.stdout[half:] != "\n"
    error = mgtp(run_folder, "chat", "http://127.0.0.1:9", code=1).err
    assert error.startswith("error: http://127.0.0.1:9 does not answer") and "hint: " in error


def test_ctrl_c_stops_an_answer_and_not_the_chat(server):
    """Ranks of its own may have taken minutes to start."""
    terminal, theirs = os.openpty()
    command = [sys.executable, "-m", "mgtp.cli", "chat", server.url, "--temperature", "0", "--max-tokens", "30000"]
    run = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert run.stdout is not None
    try:
        for _ in range(2):
            os.write(terminal, b"hello\n")
            assert run.stdout.read(20)
            run.send_signal(signal.SIGINT)
            server.wait_until_idle()
        os.write(terminal, b"/exit\n")
        run.communicate(timeout=20)
        assert run.returncode == 0
    finally:
        run.kill()
        os.close(theirs)
        os.close(terminal)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9", "--device", "cpu"], "--device is for a shard set"),
        (["http://127.0.0.1:9", "--cp-size", "2"], "--cp-size is for a shard set"),
        (["127.0.0.1:9"], "as http://127.0.0.1:9"),
    ],
)
def test_chat_says_what_cannot_be(arguments, words, capsys):
    from mgtp.cli.app import main

    assert main(["chat", *arguments]) == 2
    assert words in capsys.readouterr().err
