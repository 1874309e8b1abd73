"""What MODEL can be: each form is told apart, and a mistyped path is never looked up on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgtp.shardplan.errors import CheckpointError, MgtpError, UsageError
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.sources.config_only import open_config
from tests.tiny import write_llama


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening something on the hub raises LookupError with the id."""

    def look_up(repo: str, *_: object, **__: object) -> None:
        raise LookupError(repo)

    monkeypatch.setattr("mgtp.shardplan.sources.hub.open_hub", look_up)


@pytest.mark.parametrize(
    "model",
    ["./org/name", "../name", "~/name", "/tmp/no/such", "a/b/c", "name", "", "org/name/", "org/x.gguf", "org/m.safetensors",
     "org/na me", "~nobody-such/x", "a\0b/c", "x" * 5000],
)  # fmt: skip
def test_a_path_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder") as caught:
        open_source(model)
    assert "org/name" in caught.value.hint
    assert "\n" not in caught.value.message


def test_org_name_is_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="org/some-Model_1"):
        open_source("org/some-Model_1")
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "org" / "name")
    assert open_source("org/name").label == "org/name"  # what exists on disk comes first


def test_a_revision_is_for_the_hub_only(tmp_path: Path) -> None:
    folder = str(write_llama(tmp_path / "m"))
    for model in (folder, "./nowhere"):
        with pytest.raises(UsageError, match="--revision"):
            open_source(model, revision="main")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_llama(tmp_path / "m")
    assert open_source("~/m").label == "~/m"


def test_single_files(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    with pytest.raises(CheckpointError) as caught:
        open_source(str(folder / "model.safetensors"))
    assert caught.value.hint == f"pass the folder: {folder}"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a folder"):
        open_source(str(tmp_path / "notes.txt"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError):
        open_source(str(tmp_path / "dangling"))


def test_gguf_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr("mgtp.shardplan.sources.gguf.open_gguf", lambda path, label: opened.append((path, label)))
    one = tmp_path / "a.gguf"
    one.write_bytes(b"GGUF")
    open_source(str(one))
    open_source(str(tmp_path))
    assert opened == [(one, str(one)), (one, str(tmp_path))]
    with pytest.raises(CheckpointError, match="a GGUF file, not a config") as caught:
        open_config(one)
    assert "--dummy-weights" in caught.value.hint
    loud = one.rename(tmp_path / "A.GGUF")
    open_source(str(loud))
    open_source(str(tmp_path))
    assert opened[2:] == [(loud, str(loud)), (loud, str(tmp_path))]
    loud.rename(one)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        open_source(str(tmp_path))
    write_llama(tmp_path)
    assert open_source(str(tmp_path)).tensors  # a Hugging Face folder that also holds GGUF files
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="GGUF files only"):
        open_source(str(tmp_path))


def test_a_folder_with_a_plan_is_a_shard_set(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "plan.json").write_text("{}")
    with pytest.raises(MgtpError, match=r"plan\.json"):
        open_source(str(folder))
