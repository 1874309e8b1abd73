"""Sampling defaults that a model states in generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..shardplan.errors import CheckpointError

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(folder: Path) -> dict[str, Any]:
    """The model's own sampling options; greedy when it says do_sample false. Empty without a file."""
    path = folder / "generation_config.json"
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
    return {field: config[field] for field in _FIELDS if config.get(field) is not None}
