"""A shard set on disk, or its plan alone. When `ShardSet.open` returns, all but the weights themselves was checked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import ModelConfig
from .errors import CheckpointError, UsageError
from .families import parse_config
from .hashing import hash_bytes
from .in_use import InUse
from .journal import journal_key
from .layout import header_bytes
from .plan import PLAN_FILE, RankPlan, ShardPlan, decode_plan, effective_model
from .plan_check import check_against_model, check_fields
from .sources.files import open_regular, parse_json_object, read_bytes, read_small_file
from .sources.small_files import CONFIG_FILE, SMALL_FILES
from .values import counted, shown

_PLAN_LIMIT = 1 << 30
_COPY_AGAIN = "copy the file again from where the set was written, or shard the checkpoint again"


@dataclass(frozen=True)
class PlanFolder:
    """A folder whose plan.json fits together in itself. The other files of the plan may be missing or damaged."""

    path: Path
    plan: ShardPlan

    def rank_path(self, rank: int) -> Path:
        """Where a rank's file is."""
        return self.path / self.plan.ranks[rank].file

    def check_rank_file(self, rank: RankPlan) -> None:
        """Raise CheckpointError unless the file has the plan's size, and the header that follows from the plan."""
        file = self.rank_path(rank.rank)
        expected = header_bytes(rank, self.plan.tp_size, self.plan.fingerprint)
        with _copying(), open_regular(file) as (fd, stamp):
            head = read_bytes(fd, file, 0, min(stamp.size, len(expected)))
        if len(head) == len(expected) and head != expected:
            raise CheckpointError(f"{file}: {_what_it_is(head, self.plan, rank.rank)}", _COPY_AGAIN)
        if stamp.size != rank.bytes:
            raise CheckpointError(f"{file}: {stamp.size} bytes, the plan says {rank.bytes}", _COPY_AGAIN)

    def read_file(self, name: str) -> bytes:
        """A small file; raises CheckpointError unless it has the size and hash that the plan records."""
        wanted = self.plan.files[name]
        with _copying():
            content = read_small_file(self.path / name)[0]
        if len(content) != wanted.bytes or hash_bytes(content) != wanted.hash:
            raise CheckpointError(f"{self.path / name}: not the file that was written with the set", _COPY_AGAIN)
        return content

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are not in the folder."""
        return [name for name in names if not os.path.lexists(self.path / name)]

    def foreign_files(self) -> list[str]:
        """Small files that a checkpoint may have, but not this one: they would be taken for its own."""
        return [n for n in SMALL_FILES if n not in self.plan.files and os.path.lexists(self.path / n)]

    def read_model(self, config: bytes, ranks: Iterable[int]) -> tuple[Mapping[str, Any], ModelConfig]:
        """What config.json holds and describes; raises CheckpointError unless the plan, of `ranks` in full, is for it."""
        where = str(self.path / CONFIG_FILE)
        values = parse_json_object(config, where)
        model = effective_model(parse_config(values, where), self.plan)
        check_against_model(self.plan, model, str(self.path / PLAN_FILE), ranks)
        return values, model


def open_plan(path: Path) -> PlanFolder:
    """A folder's plan alone; raises CheckpointError when there is none, or one that cannot be true."""
    path = Path(path)
    plan = decode_plan(_read_plan(path), path / PLAN_FILE)
    check_fields(plan, str(path / PLAN_FILE))
    if CONFIG_FILE not in plan.files:
        raise CheckpointError(f"{path / PLAN_FILE}: damaged plan: {CONFIG_FILE} is missing", _COPY_AGAIN)
    return PlanFolder(path, plan)


@dataclass(frozen=True)
class ShardSet(PlanFolder):
    """A folder written by `mgtp shard`. `config` is the content of config.json, `model` what it and the plan say.

    Sets to run are held `in_use` for as long as this object lives. Without `has_weights`, `path` is a config.json or its
    folder, and ranks take random weights.
    """

    config: Mapping[str, Any]
    model: ModelConfig
    files: Mapping[str, bytes]
    has_weights: bool = True
    in_use: InUse | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path, *, tp_size: int | None = None, ranks: Iterable[int] | None = None) -> ShardSet:
        """Open a shard set and check it: plan, small files by hash, rank files by size and header. No weights are read.

        With `ranks`, only their files have to be there and are looked at. Raises UsageError when `tp_size` is not the
        set's own, CheckpointError for everything else, naming the file.
        """
        folder = open_plan(path)
        path, plan = folder.path, folder.plan
        if tp_size not in (None, plan.tp_size):
            raise UsageError(
                f"--tp-size {tp_size}: {path} was sharded for tp size {plan.tp_size}",
                f"leave --tp-size out, or write such a set: mgtp shard {path} --tp-size {tp_size}",
            )
        wanted = [plan.ranks[r] for r in (range(plan.tp_size) if ranks is None else ranks)]
        missing = folder.missing([*plan.files, *(rank.file for rank in wanted)])
        if len(missing) > 1:
            raise CheckpointError(f"{path}: {counted(len(missing), 'missing file')}: {', '.join(missing)}", _COPY_AGAIN)
        files = {name: folder.read_file(name) for name in plan.files}
        for name in folder.foreign_files():
            raise CheckpointError(
                f"{path / name}: not part of the shard set",
                "remove it, or put it into the checkpoint and shard that again",
            )
        config, model = folder.read_model(files[CONFIG_FILE], [rank.rank for rank in wanted])
        for rank in wanted:
            folder.check_rank_file(rank)
        return cls(path, plan, config, model, files)

    def model_files(self) -> Mapping[str, bytes]:
        """The small files by name: config, tokenizer, chat template."""
        return self.files


def _read_plan(path: Path) -> bytes:
    """The content of plan.json; raises CheckpointError saying what the folder is instead."""
    if not path.is_dir():
        what = "a file, not a shard set" if path.exists() else "no such folder"
        hint = (
            f"write a shard set first: mgtp shard {path} --tp-size N --out DIR" if path.exists() else "check the path"
        )
        raise CheckpointError(f"{path}: {what}", hint)
    if os.path.lexists(path / PLAN_FILE):
        with _copying():
            return read_small_file(path / PLAN_FILE, _PLAN_LIMIT)[0]
    if journal_key(path) is not None:
        raise CheckpointError(
            f"{path}: an unfinished shard set (no {PLAN_FILE})",
            "run the same mgtp shard command again: it continues where it stopped",
        )
    if any(path.glob("rank-*-of-*.safetensors")):
        raise CheckpointError(f"{path}: rank files without {PLAN_FILE}", f"copy {PLAN_FILE} too, or shard again")
    if (path / CONFIG_FILE).exists():
        hint = f"a checkpoint has to be sharded first: mgtp shard {path} --tp-size N --out DIR"
        raise CheckpointError(f"{path}: not a shard set (no {PLAN_FILE})", hint)
    raise CheckpointError(f"{path}: not a shard set (no {PLAN_FILE})", "name a folder that mgtp shard wrote")


def _what_it_is(head: bytes, plan: ShardPlan, rank: int) -> str:
    """Why a rank file's header is not the expected one, from what it says of itself."""
    try:
        size = int.from_bytes(head[:8], "little")
        metadata = json.loads(head[8 : 8 + size])["__metadata__"]
        found = [str(metadata[f"mgtp_{key}"]).strip() for key in ("fingerprint", "rank", "tp_size")]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "the header is damaged"
    fingerprint, found_rank, tp_size = found
    if fingerprint != plan.fingerprint:
        return f"belongs to another checkpoint ({shown(fingerprint)}, this set is {plan.fingerprint})"
    if (found_rank, tp_size) != (str(rank), str(plan.tp_size)):
        return f"is rank {found_rank} of {tp_size}, not rank {rank} of {plan.tp_size}"
    return "the header is damaged, or the file belongs to another set of the same checkpoint"


class _copying:
    """Within a shard set, a file that is missing or short was not copied: say that instead of 'download it'."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointError):
            raise CheckpointError(error.message, _COPY_AGAIN) from None
