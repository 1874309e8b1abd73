"""The hashes of a shard set: of a tensor's bytes, of a rank's tensors together, and of a checkpoint's content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from .sources.base import TensorInfo

_CHUNK = 4 << 20

# What differs between two downloads of the same weights, or is written by the tool that saved them.
_VOLATILE_KEYS = ("_name_or_path", "_commit_hash", "transformers_version")


def new_hash() -> xxhash.xxh3_128:
    """A running hash of the plan's algorithm; `update` lets other threads run."""
    return xxhash.xxh3_128()


def hash_bytes(data: Any) -> str:
    """The hash of anything that has a buffer."""
    return xxhash.xxh3_128(data).hexdigest()


def hash_file_range(fd: int, offset: int, size: int) -> str | None:
    """The hash of `size` bytes of a file from `offset` on, read in bounded pieces; None when it ends before."""
    running, buffer = new_hash(), memoryview(bytearray(min(size, _CHUNK)))
    while size:
        count = os.preadv(fd, [buffer[: min(size, _CHUNK)]], offset)
        if count == 0:
            return None
        running.update(buffer[:count])
        offset, size = offset + count, size - count
    return running.hexdigest()


def hash_rank(tensor_hashes: Iterable[str]) -> str:
    """A rank's hash: that of its tensors' hashes as raw bytes, padding included, in file order."""
    return hash_bytes(b"".join(bytes.fromhex(h) for h in tensor_hashes))


def fingerprint(tensors: Iterable[tuple[TensorInfo, str]], config: Mapping[str, Any]) -> str:
    """The fingerprint of a checkpoint: its tensors, each with the hash of its values, and its settings."""
    running = new_hash()
    for info, digest in tensors:
        shape = "x".join(map(str, info.shape))
        running.update(f"{info.name} {info.dtype} {shape} {digest}\n".encode(errors="surrogatepass"))
    settings = {k: v for k, v in config.items() if k not in _VOLATILE_KEYS}
    running.update(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode())
    return f"xxh3_128:{running.hexdigest()}"
