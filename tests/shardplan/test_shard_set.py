"""Opening a shard set is strict: whatever is not what was written is refused, by name, before any weight is read."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgtp.shardplan.errors import CheckpointError, UsageError
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.shard_set import ShardSet
from mgtp.shardplan.writer import write_shards
from tests.shardplan.memory_source import llama_source


def shard(out: Path, tp_size: int = 2, seed: int = 0, dtype: str = "auto", **changes: Any) -> Path:
    source = llama_source(seed=seed, num_hidden_layers=1, **changes)
    source.files = {**source.files, "tokenizer.json": b'{"model": {}}'}
    write_shards(source, make_plan(source, tp_size, dtype), out)
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard(tmp_path_factory.mktemp("written") / "set")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "set"))


def refused(folder: Path, *words: str, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        ShardSet.open(folder, **options)
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint
    return caught.value


# --- what is right ----------------------------------------------------------------------------------------------------


def test_opens(folder: Path) -> None:
    shard_set = ShardSet.open(folder, tp_size=2)
    assert len(shard_set.model.layers) == 1
    assert shard_set.rank_path(1) == folder / "rank-1-of-2.safetensors"
    assert set(shard_set.model_files()) == {"config.json", "tokenizer.json"}


def test_moved_copied_and_read_only(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    for path in moved.iterdir():
        path.chmod(0o444)
    moved.chmod(0o555)
    try:
        ShardSet.open(moved)
    finally:
        moved.chmod(0o755)


def test_one_rank_alone(folder: Path) -> None:
    """The plan, the small files and one rank file are enough for that rank, and only its file is looked at."""
    (folder / "rank-0-of-2.safetensors").unlink()
    ShardSet.open(folder, ranks=[1])
    refused(folder, "rank-0-of-2.safetensors", "no such file")
    refused(folder, "rank-0-of-2.safetensors", ranks=[0])


def test_tied_set_says_so(tmp_path: Path) -> None:
    shard_set = ShardSet.open(shard(tmp_path / "tied", tie_word_embeddings=True))
    assert shard_set.model.tie_word_embeddings
    assert shard_set.plan.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not any(t.name == "lm_head.weight" for t in shard_set.plan.ranks[0].tensors)


# --- folders that are no shard set ------------------------------------------------------------------------------------


def test_other_tp_size_is_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--tp-size 4: .*set was sharded for tp size 2") as caught:
        ShardSet.open(folder, tp_size=4)
    assert f"mgtp shard {folder} --tp-size 4" in caught.value.hint


def test_not_a_set(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path, "not a shard set")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "mgtp shard" in refused(tmp_path / "model.gguf", "a file, not a shard set").hint
    (tmp_path / "config.json").write_text("{}")
    assert "mgtp shard" in refused(tmp_path, "not a shard set").hint


def test_old_format_says_how_to_rewrite(folder: Path) -> None:
    edit(folder, format_version=0)
    hint = refused(folder, "format version 0", "reads version 1").hint
    assert hint.endswith(f"mgtp shard CHECKPOINT --tp-size 2 --dtype float32 --force --out {folder}")


# --- rank files that are not the right ones ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 4096, None])
def test_short_file(folder: Path, cut: int | None) -> None:
    path = folder / "rank-1-of-2.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - cut if cut else 0)
    refused(folder, "rank-1-of-2.safetensors")


def test_long_file(folder: Path) -> None:
    with (folder / "rank-1-of-2.safetensors").open("ab") as file:
        file.write(b"\0")
    refused(folder, "rank-1-of-2.safetensors", "the plan says")


def test_swapped_files(folder: Path) -> None:
    a, b = (folder / f"rank-{r}-of-2.safetensors" for r in (0, 1))
    assert a.stat().st_size == b.stat().st_size
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)
    refused(folder, "rank-0-of-2.safetensors", "is rank 1 of 2, not rank 0 of 2")


def test_file_of_another_checkpoint(folder: Path, tmp_path: Path) -> None:
    other = shard(tmp_path / "other", seed=1)
    shutil.copy(other / "rank-1-of-2.safetensors", folder)
    refused(folder, "rank-1-of-2.safetensors", "belongs to another checkpoint")


def test_file_of_another_tp_size_or_dtype(folder: Path, tmp_path: Path) -> None:
    other = shard(tmp_path / "tp4", tp_size=4)
    shutil.copy(other / "rank-1-of-4.safetensors", folder / "rank-1-of-2.safetensors")
    refused(folder, "is rank 1 of 4, not rank 1 of 2")
    half = shard(tmp_path / "half", dtype="float16")
    shutil.copy(half / "rank-1-of-2.safetensors", folder)
    refused(folder, "another set of the same checkpoint")


def test_not_a_regular_file(folder: Path) -> None:
    """A named pipe must not make the command wait."""
    (folder / "rank-0-of-2.safetensors").unlink()
    os.mkfifo(folder / "rank-0-of-2.safetensors")
    refused(folder, "rank-0-of-2.safetensors", "not a regular file")


def test_every_flip_in_a_header_is_seen(folder: Path) -> None:
    path = folder / "rank-0-of-2.safetensors"
    original = path.read_bytes()
    choose = random.Random(1)
    for _ in range(300):
        changed = bytearray(original)
        changed[choose.randrange(4096)] ^= 1 << choose.randrange(8)
        path.write_bytes(changed)
        refused(folder, "rank-0-of-2.safetensors")


# --- small files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_edited_or_missing_small_file(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b" ")
    refused(folder, name, "not the file that was written with the set")
    (folder / name).unlink()
    refused(folder, name, "no such file")


def test_added_small_file(folder: Path) -> None:
    """The runtime would read it, though the plan knows nothing of it."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    refused(folder, "chat_template.jinja", "not part of the shard set")


# --- plans that cannot be true ----------------------------------------------------------------------------------------


def edit(folder: Path, **changes: Any) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, **changes}))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def replaced(plan: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(plan)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return changed


def opens(folder: Path) -> ShardSet | None:
    """The set, or None when it is refused with a line that names the file."""
    refusal = ""
    try:
        return ShardSet.open(folder)
    except CheckpointError as error:
        refusal = error.message
    assert str(folder) in refusal
    return None


HARMLESS = ("tool", "notes")
"""Fields that nothing is built on."""


def test_every_field_of_a_plan_is_checked(folder: Path) -> None:
    """Each value in turn replaced by others, of its own and other types: refused by name, or one of the harmless fields."""
    plan = json.loads((folder / "plan.json").read_text())
    choose = random.Random(2)
    values: list[Any] = [0, 1, -1, 2, 3, 10**9, 10**30, 1.5, True, None, "", "x", "../x", [], {}, [[0, 1]], "BF16"]
    accepted = set()
    for path in leaves(plan):
        if not path:
            continue
        for new in choose.sample(values, 4):
            changed = replaced(plan, path, new)
            if json.dumps(changed) == json.dumps(plan):
                continue
            (folder / "plan.json").write_text(json.dumps(changed))
            if opens(folder):
                accepted.add(path[0])
    assert accepted <= set(HARMLESS)


def test_flipped_bits_in_a_plan(folder: Path) -> None:
    """A thousand seeded flips and cuts of plan.json: a clean refusal, or a plan whose ranks and axes are the same."""
    original = (folder / "plan.json").read_bytes()
    right = ShardSet.open(folder).plan
    choose = random.Random(3)
    for trial in range(1000):
        changed = bytearray(original)
        if trial % 10 == 0:
            del changed[choose.randrange(len(changed)) :]
        else:
            for _ in range(choose.choice((1, 1, 2, 5))):
                changed[choose.randrange(len(changed))] = choose.choice(
                    (choose.randrange(256), ord(choose.choice(string.printable)))
                )
        (folder / "plan.json").write_bytes(changed)
        if (opened := opens(folder)) is None:
            continue
        plan = opened.plan
        assert (plan.ranks, plan.axes, plan.ties, plan.dtype) == (right.ranks, right.axes, right.ties, right.dtype)


def test_shares_are_held_against_the_ranges(folder: Path) -> None:
    edit(folder, shares=[2, 1])
    refused(folder, "plan.json", "shares [2, 1]")


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/rank-0-of-2.safetensors", "rank-1-of-2.safetensors"])
def test_file_names_stay_inside(folder: Path, name: str) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(replaced(plan, ("ranks", 0, "file"), name)))
    refused(folder, "rank 0's file is")
    (folder / "plan.json").write_text(json.dumps(replaced(plan, ("files", name), plan["files"]["config.json"])))
    refused(folder, "is not the name of a small file")


def test_deeply_nested_plan(folder: Path) -> None:
    (folder / "plan.json").write_text("[" * 100000)
    refused(folder, "plan.json")
