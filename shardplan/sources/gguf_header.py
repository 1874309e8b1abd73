"""The header of a GGUF file: metadata and tensor table, read strictly, once, in bounded memory.

`gguf.GGUFReader` is not used for this: it keeps a numpy array for every string and number (19 s and 880 MB for a
vocabulary of 262144 tokens, here half a second and 30 MB), and on a damaged file it can loop or allocate without
end. Types and block sizes are gguf-py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from ..errors import CheckpointError
from ..values import shown
from .files import DOWNLOAD_AGAIN, wrong_content
from .gguf_metadata import CONVERT_AGAIN, Metadata

_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 20
_MAX_ARRAY = 1 << 24
_MAX_STRING = 1 << 24
_MAX_HEADER = 1 << 30
_MAX_DIMS = 4
_MIN_ENTRY_BYTES = 8 + 4 + 1  # an empty key, a type and the smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type and an offset

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_OLD_MAGICS = (b"tjgg", b"lmgg", b"fmgg", b"algg")


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table, under its GGUF name.

    `shape` is rows first, as in PyTorch (GGUF stores it the other way round); `offset` counts from the start of the
    file; `row_bytes` is what one run along the last dimension takes.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


def read_header(file: BinaryIO, size: int, where: str) -> tuple[Metadata, Mapping[str, GgufTensor]]:
    """Metadata and tensors (by GGUF name) of an open file of `size` bytes, positioned at its start.

    Raises CheckpointError, starting with `where`, for anything but a complete little-endian GGUF version 2 or
    3: another format, a cut file, counts or lengths that cannot be true, duplicates, tensors that overlap.
    """
    cursor = _Cursor(file, size, where)
    _check_format(cursor)
    num_tensors, num_entries = cursor.u64(), cursor.u64()
    least = num_tensors * _MIN_TENSOR_BYTES + num_entries * _MIN_ENTRY_BYTES
    if max(num_tensors, num_entries) > _MAX_ENTRIES or least > size:
        raise cursor.error(
            f"the header states {num_entries} metadata entries and {num_tensors} tensors in {size} bytes"
        )
    metadata = Metadata(where, _read_metadata(cursor, num_entries))
    alignment = metadata.integer("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if alignment == 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise cursor.error(f"metadata 'general.alignment' must be a power of two, not {alignment}")
    tensors = [_read_tensor(cursor, alignment) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    return metadata, _place(tensors, data_start, cursor)


class _Cursor:
    """Reads a file front to back; every read is checked against what is left before anything is allocated."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self._file = file
        self.size = size
        self.position = 0
        self.where = where

    def error(self, message: str, hint: str = DOWNLOAD_AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}", hint)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.size - self.position or self.position + count > _MAX_HEADER:
            raise self.error(
                f"the header wants {count} bytes at {self.position}, the file has {self.size}: damaged or cut"
            )
        data = self._file.read(count)
        if len(data) != count:
            raise self.error(f"the file ended at byte {self.position + len(data)} while its header was read")
        self.position += count
        return data

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        length = self.u64()
        if length > _MAX_STRING:
            raise self.error(f"a string of {length} bytes at {self.position}: the header is damaged")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.error(f"the string at byte {self.position - length} is not UTF-8") from None


def _check_format(cursor: _Cursor) -> None:
    """Refuse what is not GGUF, by what it is, and the GGUF kinds that cannot be read; leaves the counts next."""
    magic = cursor.take(min(4, cursor.size))
    if magic != b"GGUF":
        start = magic + cursor.take(min(60, cursor.size - cursor.position))
        if magic in _OLD_MAGICS:
            raise cursor.error("a ggml file from before GGUF", CONVERT_AGAIN)
        raise cursor.error(
            *wrong_content(start) or (f"not a GGUF file, it begins with {shown(start[:8])}", DOWNLOAD_AGAIN)
        )
    version = cursor.u32()
    if version and version & 0xFFFF == 0:
        raise cursor.error("the file is big-endian", "use the little-endian file of the same model")
    if version not in _VERSIONS:
        raise cursor.error(
            f"GGUF version {version} is not supported, only {_VERSIONS[0]} and {_VERSIONS[1]}", CONVERT_AGAIN
        )


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in values:
            raise cursor.error(f"metadata {shown(key)} is there twice")
        values[key] = _read_value(cursor, key, cursor.u32())
    return values


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == GGUFValueType.STRING:
        return cursor.string()
    if kind == GGUFValueType.ARRAY:
        return _read_array(cursor, key)
    dtype = _SCALARS.get(kind)  # type: ignore[arg-type]
    if dtype is None:
        raise cursor.error(f"metadata {shown(key)} has the unknown type {kind}")
    value = np.frombuffer(cursor.take(np.dtype(dtype).itemsize), dtype)[0]
    # The shortest decimal that gives the same 32 bits: 1e-05, as the model's config said, not 9.999999747378752e-06.
    return float(str(value)) if dtype == "<f4" else value.item()


def _read_array(cursor: _Cursor, key: str) -> list[str] | np.ndarray:
    kind, count = cursor.u32(), cursor.u64()
    if count > _MAX_ARRAY:
        raise cursor.error(f"metadata {shown(key)} is an array of {count} values: the header is damaged")
    if kind == GGUFValueType.STRING:
        return [cursor.string() for _ in range(count)]
    dtype = _SCALARS.get(kind)  # type: ignore[arg-type]
    if dtype is None:
        raise cursor.error(f"metadata {shown(key)} is an array of the unsupported type {kind}")
    return np.frombuffer(cursor.take(count * np.dtype(dtype).itemsize), dtype)


def _read_tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """One table entry; its offset still counts from the start of the data."""
    name = cursor.string()
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(f"tensor {shown(name)} has {num_dims} dimensions")
    shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
    kind, offset = cursor.u32(), cursor.u64()
    try:
        tensor_type = GGMLQuantizationType(kind)
    except ValueError:
        raise cursor.error(
            f"tensor {shown(name)} has the unknown type number {kind}",
            "use another quantisation of the model, such as Q4_K_M",
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if min(shape) == 0 or shape[-1] % block:
        raise cursor.error(f"tensor {shown(name)} has shape {list(shape)}, which {tensor_type.name} cannot have")
    if offset % alignment:
        raise cursor.error(f"tensor {shown(name)} starts at {offset}, which is not a multiple of {alignment}")
    return GgufTensor(name, tensor_type, shape, offset, shape[-1] // block * block_bytes)


def _place(tensors: list[GgufTensor], data_start: int, cursor: _Cursor) -> dict[str, GgufTensor]:
    """Tensors by name, offsets from the start of the file; each inside the file and apart from the others."""
    placed: dict[str, GgufTensor] = {}
    for t in tensors:
        if t.name in placed:
            raise cursor.error(f"tensor {shown(t.name)} is there twice")
        end = data_start + t.offset + t.nbytes
        if end > cursor.size:
            raise cursor.error(
                f"tensor {shown(t.name)} ends at byte {end}, but the file has only {cursor.size}: it was cut short"
            )
        placed[t.name] = GgufTensor(t.name, t.type, t.shape, data_start + t.offset, t.row_bytes)
    for a, b in pairwise(sorted(placed.values(), key=lambda t: t.offset)):
        if a.offset + a.nbytes > b.offset:
            raise cursor.error(f"tensors {shown(a.name)} and {shown(b.name)} overlap")
    return placed
