"""A shard run that ends at any moment is finished by the same command, with the bytes of an undisturbed run."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from mgtp.shardplan import rank_file
from mgtp.shardplan.errors import CheckpointError, UsageError
from mgtp.shardplan.plan import ShardPlan
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.shard_set import ShardSet
from mgtp.shardplan.writer import write_shards
from tests.crashes import content, dies_at, killed_after, run_seconds
from tests.shardplan.memory_source import MemorySource, llama_source
from tests.tiny import write_llama


def small_source(**changes: Any) -> MemorySource:
    return llama_source(num_hidden_layers=1, vocab_size=40, intermediate_size=24, hidden_size=16, **changes)


def shard(out: Path, source: MemorySource | None = None, tp_size: int = 2, **options: Any) -> ShardPlan:
    source = source or small_source()
    return write_shards(source, make_plan(source, tp_size), out, **options)


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, bytes]:
    shard(tmp_path / "undisturbed")
    return content(tmp_path / "undisturbed")


@pytest.mark.parametrize("fingerprint", [None, "hub:0123"])
def test_dying_at_every_single_step(tmp_path: Path, fingerprint: str | None) -> None:
    """Before each call that changes a file in turn, writes torn in half. Until the plan is there, the set does not open."""

    def source() -> MemorySource:
        made = small_source()
        made.fingerprint = fingerprint
        return made

    shard(tmp_path / "undisturbed", source())
    expected = content(tmp_path / "undisturbed")
    step = 0
    while dies_at(step := step + 1, lambda: shard(tmp_path / str(step), source(), threads=1)):
        out = tmp_path / str(step)
        if out.exists() and "plan.json" not in content(out):
            with pytest.raises(CheckpointError, match=r"not a shard set|unfinished"):
                ShardSet.open(out)
        if out.exists() and content(out) == expected:
            continue  # all was done, the process just had not ended yet
        shard(out, source())
        assert content(out) == expected, f"after step {step}"
    assert step > 40


def test_dying_at_every_step_of_replacing_a_set(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """With --force: what is left is the old set, the new one, or nothing that opens; never a mixture of both."""
    shard(tmp_path / "old", tp_size=4)
    old = content(tmp_path / "old")
    step = 0
    while True:
        step += 1
        out = tmp_path / str(step)
        shard(out, tp_size=4)
        if not dies_at(step, lambda: shard(out, force=True, threads=1)):  # noqa: B023 - called at once
            break
        try:
            ShardSet.open(out)
            held = {k: v for k, v in content(out).items() if not k.startswith(".")}
            assert held in (old, undisturbed), f"after step {step}"
        except CheckpointError:
            pass
        shard(out, force=True)
        assert content(out) == undisturbed, f"after step {step}"
    assert step > 40


def test_dying_twice(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """Seeded pairs of moments: the run that continues is interrupted as well."""
    choose = random.Random(7)
    for trial in range(25):
        out = tmp_path / str(trial)
        for _ in range(2):
            dies_at(choose.randint(5, 60), lambda: shard(out, threads=choose.choice((1, 3))))  # noqa: B023
            if out.exists() and content(out) == undisturbed:
                break
        else:
            shard(out)
        assert content(out) == undisturbed


def interrupted(out: Path, source: MemorySource | None = None, at: int = 30) -> None:
    assert dies_at(at, lambda: shard(out, source, threads=1))


def test_finished_tensors_are_not_read_again(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    interrupted(tmp_path / "out")
    num_done = (tmp_path / "out" / ".journal").read_bytes().count(b"\n") - 1
    assert num_done > 3
    source = small_source()
    plan = shard(tmp_path / "out", source)
    names = [t.name for t in plan.ranks[0].tensors if t.source is not None]
    assert [name for name, _, _ in source.reads] == names[num_done:]
    assert content(tmp_path / "out") == undisturbed


def test_complete_ranks_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, bytes]
) -> None:
    """Interrupted between two renames: the file that has its name is not touched again."""
    rename = rank_file.RankFile.rename

    def only_first(file: rank_file.RankFile) -> None:
        if file.plan.rank == 1:
            raise KeyboardInterrupt
        rename(file)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(rank_file.RankFile, "rename", only_first)
        with pytest.raises(KeyboardInterrupt):
            shard(out)
    assert (out / "rank-0-of-2.safetensors").exists() and (out / "rank-1-of-2.safetensors.partial").exists()
    before = (out / "rank-0-of-2.safetensors").stat()
    source = small_source()
    shard(out, source)
    after = (out / "rank-0-of-2.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert source.reads == []
    assert content(out) == undisturbed


@pytest.mark.parametrize("victim", ["rank-0-of-2.safetensors.partial", "rank-1-of-2.safetensors.partial"])
@pytest.mark.parametrize("damage", ["zeros", "short", "gone"])
def test_power_failure(tmp_path: Path, undisturbed: dict[str, bytes], victim: str, damage: str) -> None:
    """The journal reached the disk, what it speaks of did not: such bytes are written again, those of others kept."""
    out = tmp_path / "out"
    interrupted(out)
    path = out / victim
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        os.truncate(path, 4096 + 700)
    else:
        with path.open("r+b") as file:
            file.seek(4096 + 600)
            file.write(bytes(500))
    shard(out)
    assert content(out) == undisturbed


@pytest.mark.parametrize("damage", [b"", b"{", b'{"source": "x"}\n', b"\x00" * 100])
def test_damaged_journal(tmp_path: Path, undisturbed: dict[str, bytes], damage: bytes) -> None:
    """A line that is no record ends the journal; a journal that is none leaves a folder that is not ours to touch."""
    out = tmp_path / "out"
    interrupted(out)
    lines = (out / ".journal").read_bytes().splitlines(keepends=True)
    (out / ".journal").write_bytes(b"".join(lines[:3]) + damage)
    shard(out)
    assert content(out) == undisturbed


def test_another_plan_or_source_starts_afresh(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    interrupted(tmp_path / "a")
    shard(tmp_path / "a", tp_size=4)
    shard(tmp_path / "b", tp_size=4)
    assert content(tmp_path / "a") == content(tmp_path / "b")

    class Edited(MemorySource):
        def identity(self) -> str:
            return "edited"

    interrupted(tmp_path / "c", at=50)
    source = small_source()
    shard(
        tmp_path / "c",
        Edited(source.config, {**source.arrays, "model.norm.weight": source.arrays["model.norm.weight"] + 1}),
    )
    assert content(tmp_path / "c").keys() == undisturbed.keys()
    assert content(tmp_path / "c")["plan.json"] != undisturbed["plan.json"]


def test_unfinished_set_says_how_to_continue(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    with pytest.raises(CheckpointError, match="unfinished shard set") as caught:
        ShardSet.open(tmp_path / "out")
    assert "run the same mgtp shard command again" in caught.value.hint


def test_complete_set_is_not_written_again(tmp_path: Path) -> None:
    shard(tmp_path / "out")
    with pytest.raises(UsageError, match="already holds"):
        shard(tmp_path / "out")


@pytest.mark.parametrize("signal_error", [KeyboardInterrupt, SystemExit])
def test_interrupting_from_within(
    tmp_path: Path, undisturbed: dict[str, bytes], signal_error: type[BaseException]
) -> None:
    """Ctrl-C and SIGTERM arrive as exceptions in the main thread: threads end, files are closed, the lock is gone."""
    out = tmp_path / "out"
    before = set(os.listdir("/proc/self/fd"))

    def progress(done: int, total: int) -> None:
        raise signal_error

    with pytest.raises(signal_error):
        shard(out, progress=progress)
    assert not (out / ".lock").exists()
    assert set(os.listdir("/proc/self/fd")) == before
    shard(out)
    assert content(out) == undisturbed


def test_kill_9(tmp_path: Path) -> None:
    """The real thing, at three seeded moments of a run that takes a while; `make soak` has fifty."""
    model = write_llama(tmp_path / "model", hidden=512, ffn=2048, layers=6, vocab=8000)
    command = ["shard", str(model), "--tp-size", "3", "--out"]
    seconds = run_seconds(*command, str(tmp_path / "undisturbed"))
    expected = content(tmp_path / "undisturbed")
    choose = random.Random(3)
    for trial in range(3):
        out = tmp_path / str(trial)
        if killed_after(choose.uniform(0.3, 0.95) * seconds, *command, str(out)):
            run_seconds(*command, str(out))
        assert content(out) == expected
