"""Commands that are given a checkpoint shard it once into the cache, and find it again."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from mgtp.cli.app import main
from mgtp.shardplan import cache
from mgtp.shardplan.errors import CheckpointError, MgtpError, UsageError
from mgtp.shardplan.sources import open_source
from tests.tiny import write_llama


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MGTP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def writes(source, tp_size=2, dtype="auto"):
    """The cached set's folder, and whether it had to be written."""
    written = []
    shard_set = cache.cached_set(source, tp_size, dtype, on_write=lambda path, plan: written.append(path))
    return shard_set.path, bool(written)


def test_a_checkpoint_is_sharded_once_a_tp_size_and_dtype(folder, tiny_checkpoint):
    source = open_source(str(tiny_checkpoint("base")))
    first, new = writes(source)
    assert new and first.parent == folder
    assert writes(source) == (first, False)
    for other in (writes(source, tp_size=3), writes(source, dtype="bfloat16")):
        assert other[1] and other[0] != first
    assert len(cache.entries()) == 3


def test_changed_weights_are_another_set_though_header_and_size_are_equal(folder, tiny_checkpoint, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("base"), model)
    first, _ = writes(open_source(str(model)))
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    second, new = writes(open_source(str(model)))
    assert new and second != first


def test_an_interrupted_set_is_finished(folder, tiny_checkpoint):
    source = open_source(str(tiny_checkpoint("base")))

    class Interrupted(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        cache.cached_set(source, 2, progress=interrupt)
    (entry,) = cache.entries()
    assert entry.tp_size is None
    path, new = writes(source)
    assert new and path == entry.path


def test_damage_in_the_cache_is_named_with_the_way_out(folder, tiny_checkpoint):
    source = open_source(str(tiny_checkpoint("base")))
    path, _ = writes(source)
    os.truncate(path / "rank-1-of-2.safetensors", 100)
    with pytest.raises(CheckpointError, match=r"cached .*rank-1-of-2") as error:
        writes(source)
    assert f"rm -r {path}" in error.value.hint


def test_list_and_prune(folder, tiny_checkpoint, capsys):
    for name in ("base", "tied"):
        writes(open_source(str(tiny_checkpoint(name))))
    assert main(["cache", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [s["tp_size"] for s in listed["sets"]] == [2, 2]
    assert listed["total_bytes"] == sum(s["bytes"] for s in listed["sets"])
    older, newer = listed["sets"]
    removed, skipped = cache.prune(max_bytes=newer["bytes"])
    assert [str(e.path) for e in removed] == [older["path"]] and not skipped
    assert main(["cache", "prune", "--max-size", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [], "skipped": [], "freed_bytes": 0}
    assert main(["cache", "prune", "--older-than", "1"]) == 0
    assert len(cache.entries()) == 1
    assert main(["cache", "prune", "--all"]) == 0
    assert not cache.entries()
    assert not list(folder.iterdir())


def test_a_set_that_is_being_written_is_not_pruned(folder, tiny_checkpoint):
    from mgtp.shardplan.output_folder import locked

    path, _ = writes(open_source(str(tiny_checkpoint("base"))))
    with locked(path):
        removed, skipped = cache.prune(max_bytes=0)
        assert not removed and [e.path for e in skipped] == [path]
    assert [e.path for e in cache.prune(max_bytes=0)[0]] == [path]


def test_a_set_in_use_is_not_pruned_and_named(folder, tiny_checkpoint, capsys):
    """From the moment it is found until its user has gone; others can use it all the while."""
    source = open_source(str(tiny_checkpoint("base")))
    first, second = cache.cached_set(source, 2), cache.cached_set(source, 2)
    for used in (first, second):
        assert used.in_use is not None
    del first, used
    assert main(["cache", "prune", "--all"]) == 0
    said = capsys.readouterr()
    assert said.out == "freed 0 B\n" and f"kept {second.path}: a command is using" in said.err
    assert (second.path / "plan.json").exists()
    del second
    assert main(["cache", "prune", "--all", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["removed"]) == 1


def test_a_set_that_is_removed_while_it_is_waited_for_is_written_again(folder, tiny_checkpoint):
    import threading

    from mgtp.shardplan.in_use import alone, hold

    path, _ = writes(open_source(str(tiny_checkpoint("base"))))
    found = []
    with alone(path) as unused:
        assert unused
        waiting = threading.Thread(target=lambda: found.append(hold(path)))
        waiting.start()
        shutil.rmtree(path)
    waiting.join()
    assert found == [None] and hold(path) is None
    assert writes(open_source(str(tiny_checkpoint("base")))) == (path, True)


def test_an_empty_cache_says_so(folder, capsys):
    assert main(["cache", "list"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"no shard sets in {folder}\n"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--prompt", "x"], 2, "has no tokenizer.json"),
        (["--prompt", "x", "--chat"], 2, "no chat template"),
        (["--prompt-ids", "1,999"], 2, "999"),
        (["--prompt-ids", "1,2", "--top-p", "7"], 2, "--top-p is 7.0"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_before_a_checkpoint_is_sharded(
    options, code, words, folder, tmp_path, capsys
):
    model = write_llama(tmp_path / "model")
    assert main(["generate", str(model), "--tp-size", "2", *options]) == code
    said = capsys.readouterr().err
    assert words in said
    if words.startswith(("has no", "no chat")):
        assert f"{model} " in said
    assert main(["chat", str(model), "--tp-size", "2"]) == 2
    assert f"{model} has no chat template" in capsys.readouterr().err
    assert not folder.exists()


def test_a_checkpoint_needs_a_tp_size(folder, tiny_checkpoint):
    from mgtp.cli.launching import open_set

    with pytest.raises(UsageError, match="is a checkpoint"):
        open_set(str(tiny_checkpoint("base")), None)
    assert open_set(str(tiny_checkpoint("base")), 2).plan.tp_size == 2


def test_a_cache_that_cannot_be_made_names_its_setting(tmp_path, monkeypatch, tiny_checkpoint):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MGTP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MgtpError, match=r"MGTP_CACHE .*/file/cache"):
        writes(open_source(str(tiny_checkpoint("base"))))


def test_a_cache_without_room_is_no_out(folder, monkeypatch, tiny_checkpoint):
    """Nobody has given --out."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096))
    with pytest.raises(MgtpError, match=f"^cached set {folder}/base-tp2.*: no space left") as error:
        writes(open_source(str(tiny_checkpoint("base"))))
    assert "set MGTP_CACHE to a folder on another disk" in error.value.hint
