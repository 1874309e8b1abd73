"""Checkpoints in every form that mgtp reads, behind one contract (`base.Source`)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CheckpointError, UsageError
from ..plan import PLAN_FILE
from ..values import shown
from .base import Source
from .files import is_gguf

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def open_source(model: str, *, revision: str | None = None, headers_only: bool = False) -> Source:
    """Open a checkpoint and check all its headers: a folder, a GGUF file, a shard set, or a model on the hub.

    What exists on disk comes first; else `org/name` is a hub id. `revision` is for the hub only. With `headers_only`
    a hub model's weights are not downloaded (`has_weights` is then false). Raises UsageError or CheckpointError.
    """
    path = os.path.expanduser(model)
    local = os.path.lexists(path)
    if revision is not None and (local or not _is_hub_id(model)):
        raise UsageError(f"--revision {revision} is for models on the hub, {shown(model)} is not one", "leave it out")
    if os.path.isdir(path):
        return _open_folder(Path(path), model)
    if local:
        return _open_file(Path(path), model)
    if not _is_hub_id(model):
        raise CheckpointError(
            f"no such file or folder: {shown(model)}", "check the path; a model on the hub is written org/name"
        )
    from .hub import open_hub

    return open_hub(model, revision, headers_only=headers_only)


def _is_hub_id(model: str) -> bool:
    """Whether a name that does not exist on disk is a hub id and not a mistyped path."""
    path_like = model.startswith((".", "/", "~")) or is_gguf(model) or model.endswith((".safetensors", ".json"))
    return not path_like and _HUB_ID.fullmatch(model) is not None


def _open_folder(path: Path, label: str) -> Source:
    from .folder import list_folder, open_folder
    from .small_files import CONFIG_FILE

    names = list_folder(path)
    if PLAN_FILE in names:
        from .shard_set import open_shard_set

        return open_shard_set(path, label)
    found = [name for name in names if is_gguf(name)]
    if not found or CONFIG_FILE in names:
        return open_folder(path, label)
    if len(found) > 1:
        raise CheckpointError(
            f"{path}: holds {len(found)} GGUF files: {', '.join(found)}", "pass one of the files itself as MODEL"
        )
    from .gguf import open_gguf

    return open_gguf(path / found[0], label)


def _open_file(path: Path, label: str) -> Source:
    if os.path.exists(path) and not path.is_file():
        from .files import file_kind

        what = file_kind(path.stat().st_mode)
        raise CheckpointError(f"{path}: {what}, not a folder and not a .gguf file", "pass a checkpoint folder")
    if is_gguf(path):
        from .gguf import open_gguf

        return open_gguf(path, label)
    raise CheckpointError(
        f"{path}: not a folder and not a .gguf file",
        f"pass the folder: {path.parent}" if path.suffix in (".safetensors", ".json") else "pass a checkpoint folder",
    )
