"""Two network namespaces stand for two hosts with a cable between: ranks on both, the cable cut, a host's processes killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import assert_nothing_left, environment, mgtp
from tests.servers import wait_for

HOST_0, HOST_1 = "10.213.7.1", "10.213.7.2"
START_SECONDS = 120
SECRET = "a secret of more than 16 characters"
LONG = json.dumps({"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "temperature": 0, "stream": True})


class Hosts:
    """Two namespaces, each with a run folder of its own and a shard set that holds only its own rank's file."""

    def __init__(self, folder: Path, shard_set: Path) -> None:
        self.folder, self.processes = folder, []
        self.names = [f"mgtp{os.getpid()}-{node}" for node in (0, 1)]
        self.cables = [f"mg{os.getpid()}-{node}" for node in (0, 1)]
        for node in (0, 1):
            files = folder / f"set-{node}"
            shutil.copytree(shard_set, files)
            (files / f"rank-{1 - node}-of-2.safetensors").unlink()
            (folder / str(node)).mkdir()

    def connect(self) -> None:
        """Make the namespaces and the cable; raises CalledProcessError where that is not permitted."""
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, (HOST_0, HOST_1), strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.names[1], "link", "set", self.cables[1], "down")

    def start(self, node: int, *options: str, secret: str = SECRET) -> Path:
        """`mgtp serve` on a host; its log."""
        arguments = ["serve", str(self.folder / f"set-{node}"), "--device", "cpu", "--port", "8000", "--nnodes", "2"]
        arguments += ["--node-rank", str(node), "--rendezvous", f"{HOST_0}:29500", *options]
        log = self.folder / f"log-{node}"
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], sys.executable, "-m", "mgtp.cli", *arguments],
                env=environment(self.folder / str(node), MGTP_CLUSTER_SECRET=secret),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return log

    def start_both(self) -> tuple[Path, Path]:
        """Both hosts, ready."""
        logs = self.start(0), self.start(1)
        wait_for(lambda: "ready in" in logs[0].read_text() or None, START_SECONDS, self.processes[1])
        return logs

    def curl(self, path: str, *options: str) -> subprocess.Popen[str]:
        """A client on host 0."""
        command = ["ip", "netns", "exec", self.names[0], "curl", "-sN", f"http://127.0.0.1:8000{path}", *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def codes(self, seconds: float) -> list[int]:
        """The exit codes, both of which must come within so many seconds."""
        deadline = time.monotonic() + seconds
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]

    def close(self) -> None:
        """Remove everything."""
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments: str) -> None:
    """Run the tool of that name."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts(tiny_checkpoint, sharded) -> Iterator[Hosts]:
    if not all(map(shutil.which, ("ip", "curl"))):
        pytest.skip("needs the tools ip and curl")
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        hosts = Hosts(Path(folder), Path(sharded(tiny_checkpoint("long32k"), 2)))
        try:
            try:
                hosts.connect()
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
            yield hosts
        finally:
            hosts.close()


def nothing_left(hosts: Hosts) -> None:
    for node in (0, 1):
        assert_nothing_left(hosts.folder / str(node))


def test_two_hosts_answer_as_one(hosts, tiny_checkpoint):
    """Each has only its own rank's file. SIGTERM to the first ends both in order."""
    hosts.start_both()
    reference = json.loads((tiny_checkpoint("long32k") / "ref.json").read_text())
    body = {"prompt": reference["prompt_ids"], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    client = hosts.curl("/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body))
    answer = json.loads(client.communicate(timeout=60)[0])
    ids = ",".join(map(str, reference["prompt_ids"]))
    options = ("--prompt-ids", ids, "--max-tokens", "24", "--temperature", "0", "--ignore-eos", "--device", "cpu")
    text = mgtp(_new(hosts.folder / "run"), "generate", str(_whole(hosts)), *options).out
    assert answer["choices"][0]["text"] == text.removesuffix("\n")
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.codes(30) == [0, 0]
    nothing_left(hosts)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _whole(hosts: Hosts) -> Path:
    """The set with all files."""
    whole = hosts.folder / "whole"
    shutil.copytree(hosts.folder / "set-0", whole)
    shutil.copy(hosts.folder / "set-1" / "rank-1-of-2.safetensors", whole)
    return whole


def test_a_node_that_is_told_to_end_says_so(hosts):
    """SIGTERM to node 1: node 0 does not wait for its silence."""
    logs = hosts.start_both()
    begin = time.monotonic()
    hosts.processes[1].send_signal(signal.SIGTERM)
    assert hosts.codes(30) == [5, 143]
    print(f"ended after {time.monotonic() - begin:.1f} s")
    assert logs[0].read_text().splitlines()[-2:] == [
        "error: rank 1 failed in stage 'running': node 1 has ended: it was told to end",
        "hint: see what it says, and start all again",
    ]
    nothing_left(hosts)


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["cut", "kill node 1", "kill rank 1", "kill node 0"])
def test_the_end_of_one_is_the_end_of_both(fault, hosts):
    """In the middle of a stream. Silence is noticed after ten seconds, an end at once."""
    logs = hosts.start_both()
    client = hosts.curl("/v1/completions", "-H", "Content-Type: application/json", "-d", LONG)
    assert client.stdout is not None
    assert client.stdout.readline().startswith("data: ")
    if fault == "cut":
        hosts.cut()
    elif fault == "kill rank 1":
        os.kill(_ranks_of(hosts, 1)[0], signal.SIGKILL)
    else:
        hosts.processes[int(fault[-1])].kill()
    codes = hosts.codes(60)
    rest = client.communicate(timeout=30)[0]
    if fault == "kill node 0":
        assert codes == [-9, 5]
        assert "error: node 0 has not been heard of for 10 s" in logs[1].read_text()
    else:
        assert codes[0] == 5
        assert "rank 1 " in rest and "rank 1 " in logs[0].read_text().splitlines()[-2]
        words = "was killed by SIGKILL" if fault == "kill rank 1" else "node 1 has not been heard of for 10 s"
        assert words in rest and words in logs[0].read_text()
    if "node" not in fault:
        nothing_left(hosts)
    else:
        assert not _ranks_of(hosts, 0) and not _ranks_of(hosts, 1)


def _ranks_of(hosts: Hosts, node: int) -> list[int]:
    from tests.processes import rank_pids

    return rank_pids(hosts.folder / str(node))


def test_a_host_with_another_secret_is_not_heard(hosts):
    """Both sides say it, within seconds; node 0 goes on waiting for the right one."""
    logs = hosts.start(0), hosts.start(1, secret="another secret of enough characters")
    assert hosts.processes[1].wait(30) == 2
    error, hint = logs[1].read_text().splitlines()[-2:]
    assert error.startswith(f"error: node 0 at {HOST_0}:29500 has another MGTP_CLUSTER_SECRET") and "hint: " in hint
    wait_for(lambda: "somebody at " in logs[0].read_text() or None, 5, hosts.processes[0])
    assert logs[0].read_text().count("MGTP_CLUSTER_SECRET") == 1
    assert "starting: device" not in logs[0].read_text()
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.processes[0].wait(30) == 0


@pytest.mark.parametrize("offset", range(3))
def test_a_port_that_is_taken(offset, tiny_checkpoint, sharded, tmp_path):
    """Each of the three is named before anything is started."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = ("--nnodes", "2", "--node-rank", "0", "--rendezvous", f"127.0.0.1:{port - offset}", "--port", "0")
        shard_set = sharded(tiny_checkpoint("long32k"), 2)
        run = mgtp(tmp_path, "serve", shard_set, "--device", "cpu", *options, code=1, MGTP_CLUSTER_SECRET=SECRET)
    error, hint = run.err.splitlines()[-2:]
    assert error == f"error: --rendezvous 127.0.0.1:{port - offset}: port {port}: Address already in use"
    assert hint == "hint: node 0 needs an address of its own, and 3 ports in a row that are free"


@pytest.mark.parametrize(
    ("options", "secret", "words"),
    [
        (("--nnodes", "2"), SECRET, "--nnodes 2 needs --node-rank"),
        (("--nnodes", "2", "--node-rank", "2", "--rendezvous", "127.0.0.1:1"), SECRET, "--node-rank 2 does not exist"),
        (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1"), SECRET, "is not HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1:1"), "short", "has 5 characters"),
        (("--nnodes", "3", "--node-rank", "0", "--rendezvous", "127.0.0.1:1"), SECRET, "the set has 2 ranks"),
        (("--node-rank", "1"), SECRET, "are for several nodes"),
        (("--nnodes", "2", "--restart", "on-failure"), SECRET, "--restart does not go with --nnodes"),
    ],
)  # fmt: skip
def test_refusals(options, secret, words, tiny_checkpoint, sharded, monkeypatch, capsys):
    from mgtp.cli.app import main

    monkeypatch.setenv("MGTP_CLUSTER_SECRET", secret)
    assert main(["serve", sharded(tiny_checkpoint("long32k"), 2), "--port", "0", "--device", "cpu", *options]) == 2
    err = capsys.readouterr().err
    assert words in err and "hint: " in err
