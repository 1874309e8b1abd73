"""Models on the hub: only what is needed is fetched, the user's environment is respected, failures are one line.

Each case runs in a process of its own, since huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mgtp.shardplan.layout import FINGERPRINT_LENGTH
from mgtp.shardplan.sources import open_source
from tests.hub_stand_in import HubStandIn, open_in_process
from tests.tiny import INDEX, write_json, write_llama, write_tokenizer

Open = Callable[..., dict[str, Any]]


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn() as hub:
        yield hub


@pytest.fixture
def open_model(hub: HubStandIn, tmp_path: Path) -> Open:
    """Opens a model in a fresh process with a private HF_HOME; keywords in capitals are environment variables."""

    def run(model: str, revision: str | None = None, headers_only: bool = False, **env: str) -> dict[str, Any]:
        hub.requests.clear()
        return open_in_process(hub, tmp_path, [model, revision, headers_only], env)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of three files, with everything around it that need not be downloaded."""
    folder = write_llama(tmp_path / "checkpoint", files=3, dtype="bfloat16")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("README.md", "pytorch_model.bin", "model.Q8_0.gguf", "onnx/model.onnx", "original/x.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not needed")
    return folder


SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]
WEIGHTS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def fetched(hub: HubStandIn) -> list[str]:
    """The blobs and files whose content was downloaded."""
    names = {hashlib.sha256(c).hexdigest(): n for f in hub.repos["org/name"].values() for n, c in f.items()}
    paths = [path for method, path, _ in hub.requests if method == "GET" and not path.startswith("/api/")]
    return sorted(names[p.rsplit("/")[-1]] if p.startswith("/cdn/") else p.split("/", 5)[5] for p in paths)


def digest(folder: Path) -> str:
    source = open_source(str(folder))
    rows = [source.rows(n, 0, t.shape[0]).tobytes() for n, t in sorted(source.tensors.items())]
    return hashlib.sha256(b"".join(rows)).hexdigest()


def fingerprint(folder: Path, names: list[str]) -> str:
    lines = "".join(
        f"{n} {hashlib.sha256((folder / n).read_bytes()).hexdigest()}\n" for n in sorted([*names, "config.json"])
    )
    return f"hub:{hashlib.sha256(lines.encode()).hexdigest()[:40]}"


def test_only_what_is_needed_is_downloaded_and_only_once(hub: HubStandIn, open_model: Open, model: Path) -> None:
    hub.add("org/name", model)
    found = open_model("org/name")
    assert fetched(hub) == sorted([*SMALL, "chat_template.jinja", INDEX, *WEIGHTS])
    assert found["label"] == "org/name"
    assert found["digest"] == digest(model)
    assert found["files"] == sorted([*SMALL, "chat_template.jinja"])
    assert found["fingerprint"] == fingerprint(model, WEIGHTS)
    assert len(found["fingerprint"]) <= FINGERPRINT_LENGTH
    assert open_model("org/name") == found
    assert fetched(hub) == []
    assert open_model("org/name", HF_HUB_OFFLINE="1") == found
    assert hub.requests == []


def test_headers_only_fetches_json_and_headers(hub: HubStandIn, open_model: Open, model: Path) -> None:
    (model / WEIGHTS[0]).write_bytes((model / WEIGHTS[0]).read_bytes())
    hub.add("org/name", model)
    found = open_model("org/name", headers_only=True)
    assert found["has_weights"] is False
    assert [r for _, p, r in hub.requests if p.startswith("/cdn/")] == ["bytes=0-100000"] * 3
    assert sorted(set(fetched(hub)) - set(WEIGHTS)) == sorted([*SMALL, INDEX])
    # names, shapes, notes and fingerprint are those of the whole checkpoint
    whole = open_model("org/name")
    assert found["tensors"] == whole["tensors"]
    assert found["fingerprint"] == whole["fingerprint"]
    # and what is in the cache is used
    cached = open_model("org/name", headers_only=True, HF_HUB_OFFLINE="1")
    assert cached == whole


def test_a_long_header_takes_two_requests(hub: HubStandIn, open_model: Open, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    save_file({f"{'x' * 200}{i:04}": np.zeros(1, np.float32) for i in range(1000)}, folder / "model.safetensors")
    hub.add("org/name", folder)
    assert len(open_model("org/name", headers_only=True)["tensors"]) == 1000
    assert sum(r.startswith("bytes=8-") for _, p, r in hub.requests if p.startswith("/cdn/")) == 1


def test_revisions(hub: HubStandIn, open_model: Open, model: Path) -> None:
    first = hub.add("org/name", model)
    write_llama(model, files=3, dtype="bfloat16", seed=1)
    hub.add("org/name", model, "v2.0")
    old, new = open_model("org/name"), open_model("org/name", "v2.0")
    assert old["digest"] != new["digest"] == digest(model)
    assert open_model("org/name", first) == old
    assert open_model("org/name", "v2.0", HF_HUB_OFFLINE="1") == new
    error = open_model("org/name", "v3")
    assert error["error"] == "org/name: revision 'v3' does not exist"
    assert error["code"] == 3
    assert "branch" in error["hint"]


def test_a_moved_branch_is_followed_by_its_changed_files_only(hub: HubStandIn, open_model: Open, model: Path) -> None:
    hub.add("org/name", model)
    open_model("org/name")
    (model / "chat_template.jinja").write_text("{{ changed }}")
    hub.add("org/name", model)
    open_model("org/name")
    assert fetched(hub) == ["chat_template.jinja"]


def test_private_and_gated_models(hub: HubStandIn, open_model: Open, model: Path) -> None:
    hub.add("org/name", model)
    hub.private["org/name"] = "hf_secret"
    for env in ({}, {"HF_TOKEN": "hf_wrong"}):
        error = open_model("org/name", **env)
        assert "no such model" in error["error"]
        assert "private" in error["error"]
        assert "HF_TOKEN" in error["hint"]
    assert open_model("org/name", HF_TOKEN="hf_secret")["digest"] == digest(model)
    assert open_model("org/name", headers_only=True, HF_TOKEN="hf_secret", HF_HOME="other")["tensors"]
    hub.private.clear()
    hub.gated.add("org/name")
    error = open_model("org/name", HF_HOME="third")
    assert "restricted" in error["error"]
    assert f"{hub.url}/org/name" in error["hint"]


def test_unknown_and_malformed_ids(open_model: Open) -> None:
    error = open_model("org/nothing")
    assert error["error"].startswith("org/nothing: no such folder here, and no such model at http://127.0.0.1")
    error = open_model("-org/name--x")
    assert error["code"] == 2


def test_offline_and_unreachable(hub: HubStandIn, open_model: Open, model: Path) -> None:
    hub.add("org/name", model)
    error = open_model("org/name", HF_HUB_OFFLINE="1")
    assert "no such folder here, and not completely in the hub's cache" in error["error"]
    assert "HF_HUB_OFFLINE" in error["hint"]
    error = open_model("org/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert "no such folder here, and the download from http://127.0.0.1:9 failed" in error["error"]
    assert "HF_ENDPOINT" in error["hint"]
    # what is in the cache still works without a connection
    whole = open_model("org/name")
    assert open_model("org/name", HF_ENDPOINT="http://127.0.0.1:9") == whole
    # headers only leave an incomplete snapshot, which offline is not taken for a model
    open_model("org/name", headers_only=True, HF_HOME="other")
    for headers_only in (False, True):
        error = open_model("org/name", headers_only=headers_only, HF_HOME="other", HF_HUB_OFFLINE="1")
        assert "no such folder here, and not completely in the hub's cache" in error["error"]


def test_an_interrupted_download_is_resumed(hub: HubStandIn, open_model: Open, tmp_path: Path) -> None:
    """The connection breaks once in mid-file: the rest is asked for, not the whole file again."""
    folder = write_llama(tmp_path / "m")
    save_file({"x": np.arange(4_000_000, dtype=np.float32)}, folder / "model.safetensors")
    hub.add("org/name", folder)

    def fault(handler: Any, path: str, content: bytes) -> bool:
        if not path.startswith("/cdn/") or handler.headers.get("Range"):
            return False
        handler.cut(content, 12_000_000)
        return True

    hub.fault = fault
    assert open_model("org/name")["digest"] == digest(folder)
    (first, second) = [r for m, p, r in hub.requests if m == "GET" and p.startswith("/cdn/")]
    assert first == ""
    assert int(second.removeprefix("bytes=").removesuffix("-")) >= 10_000_000


def test_a_failed_download_keeps_the_finished_files(hub: HubStandIn, open_model: Open, model: Path) -> None:
    hub.add("org/name", model)
    last = hashlib.sha256((model / WEIGHTS[2]).read_bytes()).hexdigest()

    def fault(handler: Any, path: str, content: bytes) -> bool:
        if path == f"/cdn/{last}":
            handler.fail(503, "")
            return True
        return False

    hub.fault = fault
    error = open_model("org/name")
    assert "no such folder here, and" in error["error"] and "busy or broken (503)" in error["error"]
    hub.fault = None
    assert open_model("org/name")["digest"] == digest(model)
    assert fetched(hub) == [WEIGHTS[2]]


def test_an_incomplete_repository_is_refused_before_weights_are_fetched(
    hub: HubStandIn, open_model: Open, model: Path
) -> None:
    (model / WEIGHTS[1]).unlink()
    hub.add("org/name", model)
    for headers_only in (True, False):
        error = open_model("org/name", headers_only=headers_only)
        assert "missing 1 of 3 files" in error["error"]
        assert WEIGHTS[1] in error["error"]
        assert not [p for _, p, _ in hub.requests if p.startswith("/cdn/")]


@pytest.mark.parametrize("headers_only", [False, True])
def test_a_repository_without_usable_weights(
    hub: HubStandIn, open_model: Open, model: Path, headers_only: bool
) -> None:
    for name in [INDEX, *WEIGHTS]:
        (model / name).unlink()
    (model / "model.Q8_0.gguf").unlink()
    hub.add("org/name", model)
    assert "PyTorch files" in open_model("org/name", headers_only=headers_only)["error"]
    save_file({"x": np.zeros(3)}, model / "a.safetensors")
    save_file({"x": np.zeros(3)}, model / "b.safetensors")
    hub.add("org/name", model)
    assert "a.safetensors, b.safetensors" in open_model("org/name", headers_only=headers_only)["error"]
    (model / "b.safetensors").unlink()
    hub.add("org/name", model)
    assert list(open_model("org/name", headers_only=headers_only)["tensors"]) == ["x"]
    write_json(model / "adapter_config.json", {})
    hub.add("org/name", model)
    assert "LoRA adapter" in open_model("org/name", headers_only=headers_only)["error"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\1\2", b"version https://git-lfs.github.com/spec/v1\n", bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b"[",
        bytes([8, 0, 0, 0, 0, 0, 0, 0]) + b'{"a":[]}', b"\xff" * 100, bytes([7, 0, 0, 0, 0, 0, 0, 0]) + b'{"a":1}',
    ],
)  # fmt: skip
def test_damaged_files_on_the_hub(hub: HubStandIn, open_model: Open, tmp_path: Path, content: bytes) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    hub.add("org/name", folder)
    assert "model.safetensors" in open_model("org/name", headers_only=True)["error"]


def test_a_truncated_file_on_the_hub(hub: HubStandIn, open_model: Open, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    os.truncate(folder / "model.safetensors", 10_000)
    hub.add("org/name", folder)
    assert "has 10000 bytes on the hub" in open_model("org/name", headers_only=True)["error"]
    assert "bytes missing" in open_model("org/name")["error"]


def test_a_cache_that_cannot_be_written_to(hub: HubStandIn, open_model: Open, model: Path, tmp_path: Path) -> None:
    hub.add("org/name", model)
    (tmp_path / "file").write_text("")
    error = open_model("org/name", HF_HOME=str(tmp_path / "file"))
    assert "cannot be used" in error["error"]
    error = open_model("org/name", HF_HOME="/proc/self/nowhere")
    assert "cannot be used" in error["error"]


def test_without_symlinks_the_fingerprint_is_left_to_the_writer(hub: HubStandIn, open_model: Open, model: Path) -> None:
    hub.add("org/name", model)
    found = open_model("org/name", HF_HUB_DISABLE_SYMLINKS="1")
    assert found["fingerprint"] is None
    assert found["digest"] == digest(model)
