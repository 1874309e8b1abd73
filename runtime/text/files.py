"""Reading the small JSON files that a checkpoint brings along."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...shardplan.errors import CheckpointError
from ...shardplan.values import json_kind


def read_text(path: Path) -> str | None:
    """The UTF-8 content of a file, None where there is none; raises CheckpointError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):  # a model may be a single file
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}", "copy the file again") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object a file holds, {} where there is no file; raises CheckpointError for anything else."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {one_line(error)}", "copy the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {json_kind(value)}, not an object", "copy the file again")
    return value


def token_text(value: Any) -> str | None:
    """The text of a special token as tokenizer_config.json writes it: a string, or {"content": ...}."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def one_line(error: BaseException) -> str:
    """An exception's message in one line, its type's name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
