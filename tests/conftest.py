"""Fixtures that are costly to make: one world of ranks and one set of reference checkpoints per test session."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
WORLD_SIZE = 9


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background ignores Ctrl-C, and so would every command under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_OFFLINE"] = "1"
    gc.set_threshold(100_000, 20, 20)  # looking through all of torch and transformers again and again takes long


@pytest.fixture(scope="session")
def world() -> Iterator:
    """Ranks that run jobs (see tests/world.py)."""
    from tests.world import World

    world = World(WORLD_SIZE)
    yield world
    world.close()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the folder of a checkpoint of tests/tiny_checkpoints.py, made on first use."""
    from tests.tiny_checkpoints import make

    folder = tmp_path_factory.mktemp("tiny")

    def checkpoint(name: str) -> Path:
        if not (folder / name).exists():
            make(str(folder), name)
        return folder / name

    return checkpoint


@pytest.fixture(scope="session")
def recipe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that saves a model of tests/recipes.py (float32, or as asked) and gives its folder."""
    from tests.recipes import build

    folder = tmp_path_factory.mktemp("recipes")

    def checkpoint(name: str, dtype: str = "float32") -> Path:
        import torch

        path = folder / f"{name}-{dtype}"
        if not path.exists():
            build(name).to(getattr(torch, dtype)).save_pretrained(path)
        return path

    return checkpoint


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function that shards a checkpoint once a (folder, tp size, dtype) and gives the shard set's folder."""
    from tests.rank_jobs import shard

    folder, made = tmp_path_factory.mktemp("sets"), {}

    def shard_set(model: Path | str, tp_size: int, dtype: str = "float32") -> str:
        key = (str(model), tp_size, dtype)
        if key not in made:
            made[key] = shard(model, folder / f"{len(made)}-tp{tp_size}", tp_size, dtype)
        return made[key]

    return shard_set


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """Where scripts/fetch_models.py puts the real models."""
    return Path(os.environ.get("MGTP_MODELS", REPOSITORY / ".models"))


@pytest.fixture(scope="session")
def smollm2(models_folder: Path) -> Path:
    """SmolLM2-135M-Instruct as GGUF; skips where it has not been fetched."""
    path = models_folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path} is missing: run scripts/fetch_models.py")
    return path


@pytest.fixture(scope="session")
def gemma3_270m(models_folder: Path) -> Path:
    """Gemma 3 270M as GGUF; skips where it has not been fetched."""
    path = models_folder / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        pytest.skip(f"{path} is missing: run scripts/fetch_models.py --all")
    return path
