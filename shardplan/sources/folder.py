"""A checkpoint in a Hugging Face folder: config.json, safetensors files and, with several of them, an index."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .base import TensorInfo
from .files import FileStamp, identity_of, read_rows, read_small_file
from .headers import Header, HeaderTensor, read_header
from .small_files import SmallFiles, read_small_files
from .weight_files import (
    ADAPTER_FILE,
    INDEX_FILE,
    check_files_exist,
    choose_weights_file,
    pick_tensors,
    read_index,
    unlisted_files_note,
)

if TYPE_CHECKING:
    import numpy as np


@dataclass(eq=False)
class FolderSource:
    """A Source over a folder. Files are open only while they are read, so any number of threads may call `rows`."""

    label: str
    folder: Path
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    notes: Sequence[str]
    headers: Mapping[str, Header]
    places: Mapping[str, tuple[str, HeaderTensor]]
    stamps: Mapping[str, FileStamp]
    fingerprint: str | None = None
    has_weights: bool = True

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor seen as [shape[0], product of the rest], read straight from its file."""
        file, tensor = self.places[name]
        header = self.headers[file]
        shape = (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.shape else (1, 1)
        offset = header.data_offset + tensor.begin
        return read_rows(self.folder / file, header.stamp, offset, tensor.dtype, shape, (start, stop))

    def identity(self) -> str:
        """A digest of the files' names, inodes, sizes and mtimes, as they were when the checkpoint was opened."""
        return identity_of(self.stamps)

    def close(self) -> None:
        """Nothing is held open."""


def open_folder(folder: Path, label: str) -> FolderSource:
    """Open a Hugging Face folder: every header is read and checked in full.

    Raises CheckpointError, naming the file and what is wrong with it.
    """
    names = list_folder(folder)
    stamps: dict[str, FileStamp] = {}
    index: dict[str, str] | None = None
    if INDEX_FILE in names:
        content, stamps[INDEX_FILE] = read_small_file(folder / INDEX_FILE)
        index = read_index(content, str(folder / INDEX_FILE))
        wanted = sorted(set(index.values()))
        check_files_exist(index, [file for file in wanted if os.path.lexists(folder / file)], str(folder))
    else:
        wanted = [choose_weights_file(names, str(folder))]
    small = read_small_files(folder)
    headers = {file: read_header(folder / file) for file in wanted}
    if index is None:
        index = dict.fromkeys(headers[wanted[0]].tensors, wanted[0])
    places, notes = pick_tensors(index, {file: header.tensors for file, header in headers.items()}, str(folder))
    stamps |= {**small.stamps, **{file: header.stamp for file, header in headers.items()}}
    return FolderSource(
        label=label,
        folder=folder,
        config=small.config,
        files=small.files,
        tensors=tensor_infos(places),
        notes=[*notes, *unlisted_files_note(index, names), *other_notes(names, small)],
        headers=headers,
        places=places,
        stamps=stamps,
    )


def list_folder(folder: Path) -> list[str]:
    """The names in a folder, sorted; raises CheckpointError when it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}", "name a folder that you can read") from None


def tensor_infos(places: Mapping[str, tuple[str, HeaderTensor]]) -> dict[str, TensorInfo]:
    """What the planner needs of each tensor."""
    return {name: TensorInfo(name, tensor.dtype, tensor.shape) for name, (_, tensor) in places.items()}


def other_notes(names: Sequence[str], small: SmallFiles) -> list[str]:
    """Notes about the folder as a whole: an adapter beside the model, and what the tokenizer check found."""
    adapter = [f"ignored {ADAPTER_FILE}: the adapter beside the model is not applied"] if ADAPTER_FILE in names else []
    return [*adapter, *small.notes]
