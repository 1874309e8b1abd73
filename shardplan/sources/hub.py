"""A model on the Hugging Face hub: what is needed of it is fetched into the hub's own cache, then read like a folder.

Environment variables (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, ...) are huggingface_hub's and mean what its
users expect.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..workers import WorkerPool
from .base import Source, TensorInfo
from .files import FileStamp, identity_of, read_small_file
from .folder import list_folder, open_folder, other_notes, tensor_infos
from .headers import HeaderTensor, check_header
from .hub_errors import hub_errors
from .small_files import CONFIG_FILE, SMALL_FILES, read_small_files
from .weight_files import INDEX_FILE, check_files_exist, choose_weights_file, pick_tensors, read_index

if TYPE_CHECKING:
    import numpy as np

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONNECTIONS = 8  # headers fetched at a time
_DAMAGED = "the file in the repository is damaged: choose another revision"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its size, and its sha256 where it is an LFS file."""

    size: int
    sha256: str | None


@dataclass(eq=False)
class HubHeadersSource:
    """A Source of which only JSON files and safetensors headers were fetched."""

    label: str
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    notes: Sequence[str]
    fingerprint: str | None
    stamps: Mapping[str, FileStamp]
    commit: str
    has_weights: bool = False

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Always raises: there are no weights here."""
        raise CheckpointError(f"{self.label}: only the headers were fetched", "open the model with its weights")

    def identity(self) -> str:
        """The commit, and the fetched files' stamps."""
        return f"{self.commit}-{identity_of(self.stamps)}"

    def close(self) -> None:
        """Nothing is held open."""


def open_hub(repo: str, revision: str | None, *, headers_only: bool) -> Source:
    """Open the model `repo` at a branch, tag or commit; the weights are downloaded unless `headers_only`.

    Raises CheckpointError when the hub refuses, cannot be reached, or has no complete safetensors checkpoint.
    """
    snapshot = Snapshot.fetch(repo, revision, json_only=headers_only)
    index = snapshot.index()
    if index is not None:
        wanted = sorted(set(index.values()))
    else:
        wanted = [choose_weights_file(snapshot.names(), repo)]
    if snapshot.has(wanted):
        # A snapshot that was fetched for its headers alone lacks what is not JSON.
        snapshot = Snapshot.fetch(repo, revision, json_only=False) if headers_only else snapshot
    else:
        listing = snapshot.listing()
        if index is not None:
            check_files_exist(index, listing.keys(), repo)
        if headers_only:
            return _open_headers(snapshot, listing, index, wanted)
        snapshot.fetch_files(wanted)
    source = open_folder(snapshot.folder, repo)
    return replace(source, fingerprint=fingerprint_of(snapshot.known_sha256(wanted), source.files[CONFIG_FILE]))


def fingerprint_of(sha256: Mapping[str, str | None], config: bytes) -> str | None:
    """The fingerprint of a model from its weight files' sha256 sums, or None when one of these is not known.

    The content of config.json belongs to it: it decides what the weights mean and how they are cut.
    """
    if not all(sha256.values()):
        return None
    digests = {**sha256, CONFIG_FILE: hashlib.sha256(config).hexdigest()}
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return f"hub:{hashlib.sha256(lines.encode()).hexdigest()[:40]}"


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository in the hub's cache; `folder` is named after the commit and may hold only some files."""

    repo: str
    revision: str | None
    folder: Path

    @classmethod
    def fetch(cls, repo: str, revision: str | None, *, json_only: bool) -> Snapshot:
        """Resolve the revision and fetch the small files and the index; falls back to the cache when offline."""
        from huggingface_hub import snapshot_download

        _progress_on_terminals_only()
        names = [name for name in SMALL_FILES if name.endswith(".json") or not json_only]
        with hub_errors(repo, revision):
            folder = snapshot_download(repo, revision=revision, allow_patterns=[*names, INDEX_FILE])
        return cls(repo, revision, Path(folder))

    def fetch_files(self, names: Iterable[str]) -> None:
        """Download the files that the cache lacks, several at a time; finished ones survive an interruption."""
        from huggingface_hub import snapshot_download

        # Names are taken literally: they come from an index and may hold fnmatch's special characters.
        patterns = [re.sub(r"([*?[])", r"[\1]", name) for name in names]
        with hub_errors(self.repo, self.revision):
            snapshot_download(self.repo, revision=self.folder.name, allow_patterns=patterns)

    def index(self) -> dict[str, str] | None:
        """The weight map, or None when the model has no index."""
        path = self.folder / INDEX_FILE
        return read_index(read_small_file(path)[0], str(path)) if os.path.lexists(path) else None

    def has(self, names: Iterable[str]) -> bool:
        """Whether all these files are in the cache."""
        return all((self.folder / name).is_file() for name in names)

    def names(self) -> list[str]:
        """The names of the repository's top-level files; offline, of those in the cache."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return list_folder(self.folder)
        return [name for name in self.listing() if "/" not in name]

    def listing(self) -> dict[str, HubFile]:
        """Every file of the commit, from the hub."""
        from huggingface_hub import HfApi

        with hub_errors(self.repo, self.revision):
            info = HfApi().model_info(self.repo, revision=self.folder.name, files_metadata=True)
        return {
            file.rfilename: HubFile(file.size or 0, file.lfs.sha256 if file.lfs else None)
            for file in info.siblings or []
        }

    def known_sha256(self, names: Iterable[str]) -> dict[str, str | None]:
        """The sha256 of each file as far as the cache tells: an LFS file's blob is named after it."""
        found: dict[str, str | None] = {}
        for name in names:
            path = self.folder / name
            # One step only: the blob may itself be a link into a store that is named after other hashes.
            blob = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
            found[name] = blob if _SHA256.fullmatch(blob) else None
        return found


def _open_headers(
    snapshot: Snapshot, listing: Mapping[str, HubFile], index: Mapping[str, str] | None, wanted: Sequence[str]
) -> HubHeadersSource:
    """Fetch and check the headers of the files `wanted` by range requests."""
    repo = snapshot.repo
    small = read_small_files(snapshot.folder)
    held = _fetch_headers(snapshot, {name: listing[name] for name in wanted})
    if index is None:
        index = dict.fromkeys(held[wanted[0]], wanted[0])
    places, notes = pick_tensors(index, held, repo)
    return HubHeadersSource(
        label=repo,
        config=small.config,
        files=small.files,
        tensors=tensor_infos(places),
        notes=[*notes, *other_notes(list(listing), small)],
        fingerprint=fingerprint_of({name: listing[name].sha256 for name in wanted}, small.files[CONFIG_FILE]),
        stamps=small.stamps,
        commit=snapshot.folder.name,
    )


def _progress_on_terminals_only() -> None:
    """The library draws its bars into files and pipes too, unless it is told not to."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not sys.stderr.isatty():
        disable_progress_bars()


def _fetch_headers(snapshot: Snapshot, files: Mapping[str, HubFile]) -> dict[str, dict[str, HeaderTensor]]:
    """The checked header of every file, several fetched at a time; the first failure ends it."""
    with WorkerPool(_CONNECTIONS) as pool:
        found = {name: pool.submit(_fetch_header, snapshot, name, file) for name, file in files.items()}
        return {name: future.result() for name, future in found.items()}


def _fetch_header(snapshot: Snapshot, name: str, file: HubFile) -> dict[str, HeaderTensor]:
    """The checked header of one file on the hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    where = f"{snapshot.repo}/{name}"
    with hub_errors(snapshot.repo, snapshot.revision):
        try:
            parsed = HfApi().parse_safetensors_file_metadata(snapshot.repo, name, revision=snapshot.folder.name)
        except (SafetensorsParsingError, AttributeError, RecursionError, TypeError, ValueError, struct.error) as error:
            raise CheckpointError(f"{where}: not a safetensors file: {error}", _DAMAGED) from None
    values: dict[str, Any] = {
        tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for tensor, info in parsed.tensors.items()
    }
    tensors, _, end = check_header({**values, "__metadata__": parsed.metadata}, where)
    if file.size <= 8 + end:
        raise CheckpointError(
            f"{where}: has {file.size} bytes on the hub, its header calls for more than {8 + end}", _DAMAGED
        )
    return tensors
