"""An opened shard set: everything but the weights themselves has been checked when `ShardSet.open` returns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ModelConfig
from .errors import CheckpointError, UsageError
from .families import parse_config
from .hashing import hash_bytes
from .journal import journal_key
from .layout import header_bytes
from .plan import PLAN_FILE, RankPlan, ShardPlan, decode_plan, effective_model
from .plan_check import check_against_model, check_fields
from .sources.files import open_regular, parse_json_object, read_bytes, read_small_file
from .sources.small_files import CONFIG_FILE, SMALL_FILES
from .values import shown

_PLAN_LIMIT = 1 << 30
_COPY_AGAIN = "copy the file again from where the set was written, or shard the checkpoint again"


@dataclass(frozen=True)
class ShardSet:
    """A folder written by `mgtp shard`. `config` is the content of config.json, `model` what it and the plan say.

    Without `has_weights`, `path` is a config.json or its folder, and ranks take random weights.
    """

    path: Path
    plan: ShardPlan
    config: Mapping[str, Any]
    model: ModelConfig
    files: Mapping[str, bytes]
    has_weights: bool = True

    @classmethod
    def open(cls, path: Path, *, tp_size: int | None = None, ranks: Iterable[int] | None = None) -> ShardSet:
        """Open a shard set and check it: plan, small files by hash, rank files by size and header. No weights are read.

        With `ranks`, only their files have to be there and are looked at. Raises UsageError when `tp_size` is not the
        set's own, CheckpointError for everything else, naming the file.
        """
        shard_set = cls.open_plan(path, tp_size=tp_size, ranks=ranks)
        for rank in shard_set.plan.ranks if ranks is None else [shard_set.plan.ranks[r] for r in ranks]:
            shard_set.check_rank_file(rank)
        return shard_set

    @classmethod
    def open_plan(cls, path: Path, *, tp_size: int | None = None, ranks: Iterable[int] | None = None) -> ShardSet:
        """`open` without a look at the rank files: the plan (the tensors of `ranks` only) and the small files."""
        path = Path(path)
        plan = decode_plan(_read_plan(path), path / PLAN_FILE)
        where = str(path / PLAN_FILE)
        check_fields(plan, where)
        if tp_size not in (None, plan.tp_size):
            raise UsageError(
                f"--tp-size {tp_size}: {path} was sharded for tp size {plan.tp_size}",
                f"leave --tp-size out, or write such a set: mgtp shard {path} --tp-size {tp_size} --out DIR",
            )
        wanted = range(plan.tp_size) if ranks is None else tuple(ranks)
        files = _read_files(path, plan)
        config = parse_json_object(files[CONFIG_FILE], str(path / CONFIG_FILE))
        model = effective_model(parse_config(config), plan)
        check_against_model(plan, model, where, wanted)
        return cls(path, plan, config, model, files)

    def model_files(self) -> Mapping[str, bytes]:
        """The small files by name: config, tokenizer, chat template."""
        return self.files

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


def _read_files(path: Path, plan: ShardPlan) -> dict[str, bytes]:
    """The small files, each with the size and hash that the plan records, and no other."""
    if CONFIG_FILE not in plan.files:
        raise CheckpointError(f"{path / PLAN_FILE}: damaged plan: {CONFIG_FILE} is missing", _COPY_AGAIN)
    files: dict[str, bytes] = {}
    for name, wanted in plan.files.items():
        with _copying():
            content = read_small_file(path / name)[0]
        if len(content) != wanted.bytes or hash_bytes(content) != wanted.hash:
            raise CheckpointError(f"{path / name}: not the file that was written with the set", _COPY_AGAIN)
        files[name] = content
    extra = [name for name in SMALL_FILES if name not in files and os.path.lexists(path / name)]
    if extra:
        raise CheckpointError(
            f"{path / extra[0]}: not part of the shard set",
            "remove it, or put it into the checkpoint and shard that again",
        )
    return files


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
