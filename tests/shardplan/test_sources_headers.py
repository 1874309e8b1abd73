"""Safetensors headers: whatever is wrong with one is said in one line, and nothing wrong is accepted.

Guards against weights read as zeros or garbage from short, foreign or forged files.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.sources.headers import HEADER_LIMIT, read_header
from mgtp.shardplan.values import counted

TENSORS = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(path: Path, header: Any, data: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


def refusal(path: Path) -> str:
    """The message with which a file is refused, checked to be one line that names the file and has a hint."""
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"b": np.zeros((2, 0, 3), np.float32), "a": np.ones(5, np.float16)}, path, {"format": "pt"})
    header = read_header(path)
    assert {name: t[:2] for name, t in header.tensors.items()} == {"a": ("F16", (5,)), "b": ("F32", (2, 0, 3))}
    assert header.metadata == {"format": "pt"}
    end = max(t.end for t in header.tensors.values())
    assert header.data_offset + end == path.stat().st_size == header.stamp.size


def test_dtypes_smaller_than_a_byte_are_known(tmp_path: Path) -> None:
    tensors = {"a": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]}}
    assert read_header(write(tmp_path / "x", tensors, 3)).tensors["a"].end == 3


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {**TENSORS["a"], **changes}}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (entry(dtype="F33"), "dtype 'F33' is unknown"),
        (entry(dtype=4), "dtype 4 is unknown"),
        (entry(dtype=[[[[[]]]]]), "is unknown"),
        (entry(shape=[2, -3]), "must list whole numbers"),
        (entry(shape=[2, 3.0]), "must list whole numbers"),
        (entry(shape=[True, 6]), "must list whole numbers"),
        (entry(shape="6"), "must list whole numbers"),
        (entry(shape=[1] * 100), "must list whole numbers"),
        (entry(shape=[1 << 61] * 30), "bytes, data_offsets give it 24"),
        (entry(shape=[10**4000]), "must list whole numbers"),
        (entry(shape=[2, 2]), "F32 [2, 2] takes 16 bytes, data_offsets give it 24"),
        (entry(data_offsets=[24, 0]), "must be two rising positions"),
        (entry(data_offsets=[0, 12, 24]), "must be two rising positions"),
        (entry(data_offsets=[-24, 0]), "must be two rising positions"),
        (entry(data_offsets=[8, 32]), "leaves 8 bytes unused after the header"),
        (entry(more=1), "needs exactly dtype, shape and data_offsets"),
        ({"a": []}, "needs exactly dtype, shape and data_offsets"),
        ({"a": None}, "needs exactly dtype, shape and data_offsets"),
        ({**TENSORS, "b": {"dtype": "F32", "shape": [1], "data_offsets": [20, 24]}}, "'b' overlaps 'a'"),
        ({**TENSORS, "b": {"dtype": "U8", "shape": [1], "data_offsets": [30, 31]}}, "leaves 6 bytes unused after 'a'"),
        ({**TENSORS, "__metadata__": []}, "__metadata__ must map names to strings"),
        ({**TENSORS, "__metadata__": {"a": 1}}, "__metadata__ must map names to strings"),
        (b'{"a": 1, "a": 2}', "key 'a' stands twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "key 'dtype' stands twice"),
        (b'{"a": 1', "not valid JSON"),
        (b"[]", "the header is not a JSON object"),
        (b'{"\\ud800": 1}', "not valid JSON"),
        (b'{"\xff": 1}', "not valid JSON"),
        pytest.param(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON", id="deep"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON", id="digits"),
        (b"", "it begins with zeros"),
    ],
)
def test_wrong_headers_are_refused(tmp_path: Path, header: Any, reason: str) -> None:
    assert reason in refusal(write(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize("depth", range(900, 1000, 7))
def test_nesting_close_to_the_limit_is_refused(tmp_path: Path, depth: int) -> None:
    """Parsing may succeed where showing the value would already recurse too deeply."""
    refusal(write(tmp_path / "x.safetensors", b'{"a": {"dtype": ' + b"[" * depth + b"]" * depth + b"}}"))
    shape = b'{"a": {"dtype": "F32", "data_offsets": [0, 1], "shape": ' + b"[" * depth + b"]" * depth + b"}}"
    refusal(write(tmp_path / "y.safetensors", shape))


@pytest.mark.parametrize(
    ("content", "reason", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer", "git lfs pull"),
        (b"<!DOCTYPE html><html><title>404</title>", "a web page", "download"),
        (b"\n  <html>", "a web page", "download"),
        (b"", "the file is empty", "download"),
        (b"\0" * 4096, "begins with zeros", "download"),
        (b"\1\0", "too short", "download"),
        (b"GGUF" + bytes(100), "a GGUF file", "gguf"),
        (b"PK\x03\x04" + bytes(100), "a PyTorch file", "convert"),
        (b"\x80\x02}q\x00" + bytes(100), "a PyTorch file", "convert"),
        (b'{"error": "not found"}' * 10, "the header would have", "download"),
    ],
)
def test_foreign_content_is_recognised(tmp_path: Path, content: bytes, reason: str, hint: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert reason in refusal(path)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert hint in caught.value.hint


def test_every_short_or_long_file_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", TENSORS)
    size = path.stat().st_size
    for cut in range(1, size - 8):
        os.truncate(path, size - cut)
        lost = counted(cut if cut <= 24 else cut - 24, "byte")
        missing = f"{lost} missing" if cut <= 24 else f"{lost} of the header missing"
        assert missing in refusal(path)
        write(path, TENSORS)
    path.write_bytes(path.read_bytes() + b"\0\0")
    assert "2 bytes too many" in refusal(path)
    os.truncate(path, path.stat().st_size - 1)
    assert "1 byte too many" in refusal(path)


def test_a_huge_header_length_allocates_nothing(tmp_path: Path) -> None:
    for length in (HEADER_LIMIT, HEADER_LIMIT + 1, 2**63, 2**64 - 1):
        refusal(write(tmp_path / "x.safetensors", TENSORS, length=length))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A named pipe must not hang, a folder must not raise IsADirectoryError."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "folder")
    assert "no such file" in refusal(tmp_path / "dangling")
    write(tmp_path / "target", TENSORS)
    (tmp_path / "link").symlink_to("target")
    assert read_header(tmp_path / "link").tensors.keys() == {"a"}
