"""The results of a batch: a JSON object a line, written as they come and read again after an interruption."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ...shardplan.errors import MgtpError, UsageError
from .request_file import Line

_PREFIX = "batch_req_"
"""Begins the `id` of a result in OpenAI's form; the digest of the request follows."""


class ResultFile:
    """The file `path` with the results of earlier runs of the same batch; `done` are the keys of their requests.

    Use as a context manager: the file is locked as long as it is open. A last line that an interruption has cut off is
    dropped. Raises UsageError for a file that holds anything but answers to these very requests, in order when
    `ordered`.
    """

    def __init__(self, path: Path, lines: Sequence[Line], *, ordered: bool) -> None:
        self.path = path
        self.done: set[str] = set()
        self.num_failed = 0
        self._encode = msgspec.json.Encoder().encode
        self._file = self._open()
        try:
            self._lock()
            self._read(lines, ordered)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as failure:
            raise self._unwritten(failure) from None
        finally:
            self._file.close()

    def write(self, document: dict[str, Any], *, failed: bool) -> None:
        """Append one result; once it is written, an interruption does not lose it."""
        content = memoryview(self._encode(document) + b"\n")
        try:
            while content:  # a disk that is getting full takes a part
                content = content[self._file.write(content) :]
        except OSError as error:
            raise self._unwritten(error) from None
        self.num_failed += failed

    def _unwritten(self, error: OSError) -> MgtpError:
        return MgtpError(f"--output {self.path}: {error.strerror}", "make room; the same command goes on from there")

    def _open(self) -> FileIO:
        try:
            if self.path.exists() and not self.path.is_file():
                raise UsageError(f"--output {self.path} is no file", "name a file")
            return self.path.open("a+b", buffering=0)
        except OSError as error:
            hint = "name a file that can be written, in a folder that exists"
            raise UsageError(f"--output {self.path}: {error.strerror}", hint) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"--output {self.path} is being written by another run", "wait for it to end") from None

    def _read(self, lines: Sequence[Line], ordered: bool) -> None:
        by_key = {line.key: line for line in lines}
        expected = iter(lines)
        end = 0
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            reader.seek(0)
            for number, raw in enumerate(reader, 1):
                if not raw.endswith(b"\n"):
                    break  # cut off
                key, digest, failed = self._identify(raw, number)
                line = by_key.get(key)
                if line is None or line.digest != digest or key in self.done:
                    raise self._foreign(number)
                if ordered and next(expected) is not line:
                    raise UsageError(
                        f"--output {self.path} line {number} is out of order", "add --unordered, as in the run before"
                    )
                self.done.add(key)
                self.num_failed += failed
                end += len(raw)
        self._file.truncate(end)

    def _identify(self, raw: bytes, number: int) -> tuple[str, str, bool]:
        """(key, digest, whether it failed) of a result."""
        try:
            document = msgspec.json.decode(raw)
            failed = document.get("error") is not None
            if "custom_id" in document:
                return str(document["custom_id"]), document["id"].removeprefix(_PREFIX), failed
            return str(document["id"]), document["request"], failed
        except (msgspec.DecodeError, AttributeError, KeyError):
            raise self._foreign(number) from None

    def _foreign(self, number: int) -> UsageError:
        return UsageError(
            f"--output {self.path} line {number} is no result of this batch: requests, options or model differ",
            "name another file, or remove this one",
        )


def openai_result(name: Any, digest: str, body: dict[str, Any] | None, error: str | None) -> dict[str, Any]:
    """A result in OpenAI's batch form: a response or an error."""
    head = {"id": f"{_PREFIX}{digest}", "custom_id": name}
    if error is not None:
        return {**head, "response": None, "error": {"code": "request_failed", "message": error}}
    return {**head, "response": {"status_code": 200, "request_id": digest, "body": body}, "error": None}


def plain_result(name: Any, digest: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A result in the plain form."""
    return {"id": name, **fields, "request": digest}


class InOrder:
    """Lets documents through in the order of `keys`, holding back those whose turn has not come."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = iter(keys)
        self._next = next(self._keys, None)
        self._held: dict[str, Any] = {}

    def push(self, key: str, document: Any) -> list[Any]:
        """What may go now that the document of `key` is there."""
        self._held[key] = document
        free = []
        while self._next in self._held:
            free.append(self._held.pop(self._next))
            self._next = next(self._keys, None)
        return free
