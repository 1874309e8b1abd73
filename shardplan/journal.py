"""What an interrupted run has finished: one line a tensor, so that the same command goes on where it stopped.

The first line holds the key of the run: a digest of the plan and of the source's identity. Every further line stands
for one tensor in file order, with the hash of its source values and of what each rank stores. A line is written when
all ranks have the tensor's bytes; whether they reached the disk is seen by hashing them again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from .plan import ShardPlan, encode_plan

JOURNAL_FILE = ".journal"


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """One finished tensor; `source` is empty where the checkpoint's fingerprint was known beforehand."""

    source: str
    ranks: list[str]


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    mgtp_journal: int
    key: str


def run_key(plan: ShardPlan, identity: str) -> str:
    """What two runs must have in common for one to continue the other. `plan` has no hashes yet."""
    return hashlib.sha256(encode_plan(plan) + identity.encode(errors="surrogateescape")).hexdigest()


def journal_key(folder: Path) -> str | None:
    """The key of the run that left a journal in `folder`; None where there is none."""
    try:
        with (folder / JOURNAL_FILE).open("rb") as file:
            return msgspec.json.decode(file.readline(256), type=_Head).key
    except (OSError, msgspec.DecodeError):
        return None


class Journal:
    """The journal in `folder`, open for appending; `records` are the tensors finished so far."""

    def __init__(self, folder: Path, key: str, num_ranks: int) -> None:
        self.path = folder / JOURNAL_FILE
        self.records: list[Record] = []
        if journal_key(folder) != key:
            fresh = self.path.with_name(f"{JOURNAL_FILE}.partial")
            fresh.write_bytes(msgspec.json.encode(_Head(1, key)) + b"\n")
            fresh.replace(self.path)
        self._file = self.path.open("r+b")
        self._read(num_ranks)

    def _read(self, num_ranks: int) -> None:
        """Take every whole record; cut off what the interruption left unfinished."""
        self._file.readline()
        end = self._file.tell()
        for line in self._file:
            try:
                record = msgspec.json.decode(line, type=Record)
            except msgspec.DecodeError:
                break
            if not line.endswith(b"\n") or len(record.ranks) != num_ranks:
                break
            self.records.append(record)
            end += len(line)
        self._file.seek(end)
        self._file.truncate()

    def append(self, record: Record) -> None:
        """Add the next tensor; the line is with the system when this returns."""
        self.records.append(record)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; the journal stays."""
        self._file.close()

    def remove(self) -> None:
        """The run is complete."""
        self.path.unlink(missing_ok=True)
