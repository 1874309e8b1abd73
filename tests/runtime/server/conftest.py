"""One server for all tests that leave it as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.processes import run_folders
from tests.servers import ServerProcess

MODEL = "tiny"


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """A place for run folders of one test."""
    with run_folders() as folder:
        yield folder


@pytest.fixture(scope="session")
def served_checkpoint(tiny_checkpoint, tmp_path_factory) -> Path:
    """The checkpoint behind `server`: a byte-level vocabulary, room for 32768 tokens, a template that knows tools."""
    folder = tmp_path_factory.mktemp("served") / "long32k"
    shutil.copytree(tiny_checkpoint("long32k"), folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}")
    return folder


@pytest.fixture(scope="session")
def reference(served_checkpoint) -> tuple[list[int], list[int]]:
    """A prompt's ids and the 24 greedy ids that transformers gives for it."""
    reference = json.loads((served_checkpoint / "ref.json").read_text())
    return reference["prompt_ids"], reference["greedy_ids"]


@pytest.fixture(scope="session")
def server(served_checkpoint, sharded) -> Iterator[ServerProcess]:
    """A running server at tp 2; every test finds it idle and leaves it so."""
    with run_folders() as folder:
        running = ServerProcess(
            folder, sharded(served_checkpoint, 2), "--served-model-name", MODEL, "--max-num-seqs", "8"
        )
        yield running
        assert running.stop() == 0, running.log


@pytest.fixture(scope="session")
def client(server) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)
