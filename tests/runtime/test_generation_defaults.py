"""A wrong sampling value in generation_config.json is blamed on that file, not on an option that nobody gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgtp.cli.sampling_options import sampling_params
from mgtp.runtime.generation_defaults import checked_defaults
from mgtp.shardplan.errors import CheckpointError, UsageError


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", 10**400), ("top_p", 2), ("top_k", 1.5),
        ("min_p", [1]), ("repetition_penalty", 0),
    ],
)  # fmt: skip
def test_a_wrong_default_names_the_file(tmp_path: Path, name: str, value: Any) -> None:
    folder = write(tmp_path, do_sample=True, **{name: value})
    with pytest.raises(CheckpointError) as raised:
        sampling_params(folder, 320, {})
    assert f"{folder / 'generation_config.json'}: {name} is " in raised.value.message
    assert raised.value.hint.startswith(f"give --{name.replace('_', '-')}, or correct the checkpoint's file")
    with pytest.raises(CheckpointError, match="generation_config") as raised:
        checked_defaults(folder)  # a server has no such option
    assert "--" not in raised.value.hint
    assert sampling_params(folder, 320, {name: 1}).validate()


def test_a_wrong_option_is_still_the_options_fault(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--top-p is 2"):
        sampling_params(write(tmp_path, top_p=0.5), 320, {"top_p": 2})
