"""Reading files that others wrote: regular files only, bounded sizes, and one line for whatever is wrong with them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..dtypes import COMMON_NAME, ITEMSIZE, numpy_dtype
from ..errors import CheckpointError
from ..values import counted, json_kind, shown

if TYPE_CHECKING:
    import numpy as np

SMALL_FILE_LIMIT = 64 << 20
"""Bytes a file that is read whole (config, tokenizer, index) may have."""

DOWNLOAD_AGAIN = "download the file again"

_READ_LIMIT = 1 << 30  # Linux transfers at most 2 GiB - 4 KiB in one call


class FileStamp(NamedTuple):
    """What changes when a file is replaced or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, FileStamp]]:
    """A read-only descriptor of a regular file, with its stamp; symbolic links are followed.

    Raises CheckpointError when there is no such file, it cannot be read, or it is not a regular file.
    """
    with _reading(path):
        # O_NONBLOCK: a named pipe would block the open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with _reading(path):
            info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{path}: {file_kind(info.st_mode)}, not a regular file", "put the file itself there")
        yield fd, FileStamp(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    finally:
        os.close(fd)


def is_gguf(path: str | Path) -> bool:
    """Whether a file calls itself a GGUF file."""
    return str(path).lower().endswith(".gguf")


def file_kind(mode: int) -> str:
    """What something that is not a regular file is."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_bytes(fd: int, path: Path, offset: int, size: int) -> bytes:
    """`size` bytes from `offset`; raises CheckpointError when the file ends before or cannot be read."""
    content = bytearray(size)
    _read_into(fd, path, offset, memoryview(content))
    return bytes(content)


def read_small_file(path: Path, limit: int = SMALL_FILE_LIMIT) -> tuple[bytes, FileStamp]:
    """The whole content of a small file; raises CheckpointError when it is larger than `limit` or cannot be read."""
    with open_regular(path) as (fd, stamp):
        if stamp.size > limit:
            raise CheckpointError(
                f"{path}: {stamp.size} bytes, more than the {limit} that such a file may have", DOWNLOAD_AGAIN
            )
        return read_bytes(fd, path, 0, stamp.size), stamp


def read_rows(
    path: Path, stamp: FileStamp, offset: int, dtype: str, shape: tuple[int, ...], rows: tuple[int, int]
) -> np.ndarray:
    """Rows [start, stop) of a dense tensor at byte `offset`, as a fresh array [stop - start, *shape[1:]].

    The file must still be the one that was checked: a changed stamp, a short read and an I/O error are
    CheckpointErrors. The file is open only during the call, so any number of threads and files is fine.
    """
    import numpy as np

    if dtype not in COMMON_NAME:
        raise CheckpointError(f"{path}: a tensor has dtype {dtype}, not a plain float", "use the unquantised weights")
    start, stop = rows
    row_bytes = ITEMSIZE[dtype]
    for size in shape[1:]:
        row_bytes *= size
    raw = np.empty((stop - start) * row_bytes, np.uint8)
    with open_regular(path) as (fd, now):
        if now != stamp:
            raise CheckpointError(f"{path}: the file changed while it was read", "run again when nothing writes to it")
        _read_into(fd, path, offset + start * row_bytes, raw.data)
    return raw.view(numpy_dtype(dtype)).reshape(stop - start, *shape[1:])


def parse_json_object(content: bytes, where: str, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in `content`; `unique` also refuses an object that has a key twice.

    Raises CheckpointError starting with `where` for anything else, including numbers that Python refuses, nesting
    that is too deep and text that cannot be written out again (lone surrogates).
    """
    try:
        text = content.decode()
        value = json.loads(text, object_pairs_hook=_without_duplicates if unique else None)
        if re.search(r"\\u[dD]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason, hint = wrong_content(content) or (f"not valid JSON: {error}", DOWNLOAD_AGAIN)
        raise CheckpointError(f"{where}: {reason}", hint) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {json_kind(value)}, not an object", DOWNLOAD_AGAIN)
    return value


def wrong_content(head: bytes) -> tuple[str, str] | None:
    """What a file is that begins with `head` and should have been something else: (reason, hint), if recognised."""
    start = head[:64].lstrip().lower()
    if not head:
        return "the file is empty", DOWNLOAD_AGAIN
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself", "run `git lfs pull` in the folder"
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page, not the file itself", "download the file again; a private model needs a login"
    if head.startswith(b"GGUF"):
        return "a GGUF file under another name", "name it .gguf and pass the file itself as MODEL"
    if head.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "a PyTorch file under another name", "convert the model to safetensors"
    if not head.strip(b"\0"):
        return "it begins with zeros: an unfinished download", DOWNLOAD_AGAIN
    return None


def identity_of(stamps: Mapping[str, FileStamp]) -> str:
    """A digest of the files' names and stamps: it changes when one of them was replaced or written to."""
    lines = "".join(f"{name}\0{'/'.join(map(str, stamp))}\n" for name, stamp in sorted(stamps.items()))
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the system says about `path` into a CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        hint = "the link's target is gone: download it again" if os.path.islink(path) else DOWNLOAD_AGAIN
        raise CheckpointError(f"{path}: no such file", hint) from None
    except PermissionError as error:
        raise CheckpointError(f"{path}: {error.strerror}", "make the file readable for you") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", "check the disk or network share") from None


def _read_into(fd: int, path: Path, offset: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        with _reading(path):
            count = os.preadv(fd, [target[done : done + _READ_LIMIT]], offset + done)
        if not count:
            raise CheckpointError(f"{path}: ends {counted(len(target) - done, 'byte')} too early", DOWNLOAD_AGAIN)
        done += count


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {shown(twice)} stands twice in one object")
    return values
