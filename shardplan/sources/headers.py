"""The safetensors header, read strictly: nothing in it is believed before it has been checked against the file.

A file is 8 little-endian length bytes, that many bytes of JSON, then the tensors' bytes without gaps or overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..dtypes import ITEMSIZE, PACKED_BITS
from ..errors import CheckpointError
from ..values import counted, shown
from .files import DOWNLOAD_AGAIN, FileStamp, open_regular, parse_json_object, read_bytes, wrong_content

HEADER_LIMIT = 100_000_000
"""Bytes a header may have: the limit of the safetensors library."""

# More dimensions than any tensor has, so that a forged header cannot make the product of a shape expensive.
_MAX_DIMENSIONS = 32
_MAX_NUMBER = 1 << 62


class HeaderTensor(NamedTuple):
    """One tensor of a file; its bytes are [begin, end) of the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header. `data_offset` is where the data section begins, `stamp` identifies the file that was read."""

    tensors: Mapping[str, HeaderTensor]
    metadata: Mapping[str, str]
    data_offset: int
    stamp: FileStamp


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file, and that the file has exactly the size it calls for.

    Raises CheckpointError, naming the file, the tensor and the reason.
    """
    with open_regular(path) as (fd, stamp):
        content = _header_bytes(fd, path, stamp.size)
    values = parse_json_object(content, f"{path}: header", unique=True)
    tensors, metadata, end = check_header(values, str(path))
    data_offset = 8 + len(content)
    _check_size(path, stamp.size, data_offset + end)
    return Header(tensors, metadata, data_offset, stamp)


def check_header(values: dict[str, Any], where: str) -> tuple[dict[str, HeaderTensor], dict[str, str], int]:
    """Check a header's JSON object: (tensors, metadata, bytes of the data section).

    Raises CheckpointError starting with `where`.
    """
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map names to strings", DOWNLOAD_AGAIN)
    tensors = {name: _tensor(value, f"{where}: tensor {shown(name)}") for name, value in values.items()}
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.begin != end:
            fault = "overlaps" if tensor.begin < end else f"leaves {counted(tensor.begin - end, 'byte')} unused after"
            raise CheckpointError(
                f"{where}: tensor {shown(name)} {fault} {shown(before) if before else 'the header'}", DOWNLOAD_AGAIN
            )
        end, before = tensor.end, name
    return tensors, metadata, end


def _header_bytes(fd: int, path: Path, size: int) -> bytes:
    """The JSON part of the header; its length is believed only as far as the file reaches."""
    head = read_bytes(fd, path, 0, min(size, 64))
    length = int.from_bytes(head[:8], "little")
    known = wrong_content(head)
    if known or size < 8:
        reason, hint = known or (f"{counted(size, 'byte')}, too short for a safetensors file", DOWNLOAD_AGAIN)
        raise CheckpointError(f"{path}: {reason}", hint)
    if length > HEADER_LIMIT:
        raise CheckpointError(
            f"{path}: not a safetensors file: the header would have {length} bytes, at most {HEADER_LIMIT} are allowed",
            DOWNLOAD_AGAIN,
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path}: {counted(8 + length - size, 'byte')} of the header missing (the file has {size})", DOWNLOAD_AGAIN
        )
    content = read_bytes(fd, path, 8, length)
    if not content.startswith(b"{"):
        raise CheckpointError(f"{path}: not a safetensors file: the header is not a JSON object", DOWNLOAD_AGAIN)
    return content


def _tensor(value: Any, where: str) -> HeaderTensor:
    """One entry of the header, checked by itself."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs exactly dtype, shape and data_offsets", DOWNLOAD_AGAIN)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in ITEMSIZE and dtype not in PACKED_BITS):
        raise CheckpointError(f"{where}: dtype {shown(dtype)} is unknown", "mgtp runs plain float weights")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: shape {shown(shape)} must list whole numbers", DOWNLOAD_AGAIN)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {shown(offsets)} must be two rising positions", DOWNLOAD_AGAIN)
    bits = math.prod(shape) * (PACKED_BITS.get(dtype) or 8 * ITEMSIZE[dtype])
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {-(-bits // 8)} bytes, data_offsets give it {end - begin}", DOWNLOAD_AGAIN
        )
    return HeaderTensor(dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(v) is int and 0 <= v < _MAX_NUMBER for v in values)


def _check_size(path: Path, size: int, wanted: int) -> None:
    if size < wanted:
        raise CheckpointError(
            f"{path}: {counted(wanted - size, 'byte')} missing (the file has {size}, its header calls for {wanted})",
            DOWNLOAD_AGAIN,
        )
    if size > wanted:
        raise CheckpointError(
            f"{path}: {counted(size - wanted, 'byte')} too many (the file has {size}, its header calls for {wanted})",
            DOWNLOAD_AGAIN,
        )
