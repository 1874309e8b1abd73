"""Sampling defaults that a model states in generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from ..shardplan.errors import CheckpointError, UsageError
from .sampling_params import STATED, SamplingParams

_FILE = "generation_config.json"


def generation_defaults(folder: Path) -> dict[str, Any]:
    """The model's own sampling options; greedy when it says do_sample false. Empty without a file."""
    path = folder / _FILE
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}", "shard the checkpoint again") from None
    if config.get("do_sample") is False:
        return {"temperature": 0.0, "repetition_penalty": config.get("repetition_penalty") or 1.0}
    return {field: config[field] for field in STATED if config.get(field) is not None}


def checked_defaults(
    folder: Path, given: Container[str] = (), way_out: Callable[[str], str] = lambda _: ""
) -> dict[str, Any]:
    """The same without those that are `given`, each in range; hints begin with the caller's `way_out` for a name."""
    defaults = {name: value for name, value in generation_defaults(folder).items() if name not in given}
    for name, value in defaults.items():
        try:
            SamplingParams(**{name: value}).validate()
        except UsageError as error:
            hint = f"{way_out(name)}correct the checkpoint's file and shard it again"
            raise CheckpointError(f"{folder / _FILE}: {error.message}", hint) from None
    return defaults
