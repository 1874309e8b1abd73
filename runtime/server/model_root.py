"""Which folders requests may name: those below the model root, wherever links and dots lead."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from .errors import ApiError


def resolve(root: Path, path: str) -> Path:
    """The folder of a shard set below `root`, links followed; raises ApiError when it, or a file in it, is elsewhere."""
    shown = repr(path[:200])
    parts = PurePath(path).parts
    if not parts or "\0" in path or PurePath(path).is_absolute() or ".." in parts:
        raise ApiError(400, f"path {shown} must be that of a folder below the model root, without '..'", param="path")
    try:
        folder = (root / path).resolve(strict=True)
        entries = [Path(entry.path).resolve() for entry in os.scandir(folder)]
    except (OSError, RuntimeError, ValueError):  # the last for half a surrogate
        raise ApiError(404, f"there is no folder {shown} below the model root", param="path") from None
    if not all(_is_below(root, each) for each in (folder, *entries)):
        raise ApiError(400, f"path {shown} leads out of the model root", param="path")
    return folder


def _is_below(root: Path, path: Path) -> bool:
    """By what the folders are and not by how they are spelt: where case does not matter, it does not matter here."""
    return any(os.path.samefile(parent, root) for parent in path.parents if parent.exists())
