"""What `write_shards` writes: every value where it belongs, always the same bytes, and nothing where it must not."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from mgtp.shardplan import output_folder, pipeline, slicing, writer
from mgtp.shardplan.errors import MgtpError, UsageError
from mgtp.shardplan.in_use import hold
from mgtp.shardplan.layout import lay_out
from mgtp.shardplan.partition import Axis, Cut, Segment, TensorSpec
from mgtp.shardplan.plan import ShardPlan, decode_plan
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.shard_set import ShardSet
from mgtp.shardplan.sharing import share
from mgtp.shardplan.slicing import ValuesError
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.writer import default_folder, write_shards
from tests.shardplan.memory_source import MemorySource, llama_source
from tests.tiny import write_llama, write_tokenizer

KINDS = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shard(out: Path, source: MemorySource | None = None, tp_size: int = 2, **options: Any) -> ShardPlan:
    source = source or llama_source()
    return write_shards(source, make_plan(source, tp_size), out, **options)


# --- every value lands where it should --------------------------------------------------------------------------------


def check_every_value(source: MemorySource, plan: ShardPlan, out: Path) -> None:
    """Each rank's tensors, read by safetensors itself, are the recorded slices of the converted source; all is covered."""
    covered = {name: np.zeros(a.shape, bool) for name, a in source.arrays.items()}
    for rank in plan.ranks:
        held = load_file(out / rank.file)
        assert set(held) == {t.name for t in rank.tensors}
        for tensor in rank.tensors:
            if tensor.source is None:
                assert not held[tensor.name].any()
                continue
            array = source.arrays[tensor.name].astype(KINDS[plan.dtype])
            index: Any = ...
            if tensor.source.dim is not None:
                picked = np.concatenate([np.arange(a, b) for a, b in tensor.source.ranges])
                index = (*(slice(None),) * tensor.source.dim, picked)
            assert held[tensor.name].tobytes() == np.ascontiguousarray(array[index]).tobytes()
            covered[tensor.name][index] = True
    assert all(mask.all() for mask in covered.values())


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    kv = draw(st.integers(1, 4))
    heads = kv * draw(st.integers(1, 4))
    n = draw(st.integers(1, min(heads, 6)))
    shares = draw(st.one_of(st.just([]), st.lists(st.integers(1, 9), min_size=n, max_size=n)))
    head_dim = 2 * draw(st.integers(1, 4))
    return {
        "config": {
            "hidden_size": draw(st.integers(1, 40)),
            "intermediate_size": draw(st.integers(n, 70)),
            "num_hidden_layers": draw(st.integers(1, 2)),
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": head_dim,
            "vocab_size": draw(st.integers(max(n, 2), 90)),
            "tie_word_embeddings": draw(st.booleans()),
            "attention_bias": draw(st.booleans()),
        },
        "tp_size": n,
        "shares": shares,
        "dtype": draw(st.sampled_from(list(KINDS))),
        "to": draw(st.sampled_from(["auto", *KINDS])),
        "window": draw(st.sampled_from([1, 100, 4096, 2 << 20])),
        "threads": draw(st.integers(1, 4)),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(geometry=geometries())
def test_every_value_lands_where_it_should(tmp_path_factory: pytest.TempPathFactory, geometry: dict[str, Any]) -> None:
    """Any head counts, sizes, ranks, shares and dtypes, any window size and number of threads; and the set opens."""
    out = tmp_path_factory.mktemp("set") / "out"
    source = llama_source(geometry["dtype"], **geometry["config"])
    plan = make_plan(source, geometry["tp_size"], geometry["to"], geometry["shares"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "WINDOW_BYTES", geometry["window"])
        done = write_shards(source, plan, out, threads=geometry["threads"])
    check_every_value(source, done, out)
    assert ShardSet.open(out).plan == done
    assert sorted(p.name for p in out.iterdir()) == sorted(["config.json", "plan.json", *(r.file for r in done.ranks)])


@pytest.mark.parametrize("limit", [slicing.WINDOW_BYTES, 64])
def test_stacked_experts_and_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """[experts, 2 x ffn, hidden] cut inside dimension 1 in two segments, [experts, hidden, ffn] along dimension 2.

    With the small limit every row counts as a large window.
    """
    monkeypatch.setattr(slicing, "WINDOW_BYTES", limit)
    monkeypatch.setattr(pipeline, "_LARGE_WINDOW", limit)
    axes = {"ffn": Axis(10, 1, tuple(share(10, [1] * 3)))}
    random = np.random.default_rng(0)
    arrays = {
        "up": random.standard_normal((4, 20, 6)).astype(np.float32),
        "down": random.standard_normal((4, 6, 10)).astype(np.float32),
        "scale": np.float32(3.5).reshape(()),
    }
    specs = [
        TensorSpec("up", (4, 20, 6), Cut(1, (Segment("ffn"), Segment("ffn", 1, 10)))),
        TensorSpec("down", (4, 6, 10), Cut(2, (Segment("ffn"),))),
        TensorSpec("scale", ()),
    ]
    source = MemorySource({"architectures": ["X"]}, arrays)
    plan = make_plan(llama_source(), 3)
    plan.ranks = [lay_out(specs, source.tensors, axes, r, 3, "F32") for r in range(3)]
    done = write_shards(source, plan, tmp_path / "out")
    check_every_value(source, done, tmp_path / "out")


def test_safetensors_opens_the_files(tmp_path: Path) -> None:
    plan = shard(tmp_path / "out")
    with safe_open(tmp_path / "out" / plan.ranks[1].file, "np") as file:
        assert file.metadata()["mgtp_rank"] == "1"
        assert file.get_tensor("model.norm.weight").shape == (64,)


def test_rank_bytes_are_file_sizes(tmp_path: Path) -> None:
    plan = shard(tmp_path / "out", tp_size=3)
    assert [r.bytes for r in plan.ranks] == [(tmp_path / "out" / r.file).stat().st_size for r in plan.ranks]


# --- the same input, the same bytes -----------------------------------------------------------------------------------


def test_output_depends_on_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the number of threads, nor on the window, nor on where and how often."""
    source = llama_source()
    for name, threads, window in (("a", 1, 2 << 20), ("b", 4, 1000), ("c", 3, 1)):
        monkeypatch.setattr(slicing, "WINDOW_BYTES", window)
        shard(tmp_path / name, source, threads=threads)
    assert content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c")


def test_source_is_read_once_front_to_back(tmp_path: Path) -> None:
    source = llama_source()
    plan = shard(tmp_path / "out", source, threads=4)
    order = [t.name for t in plan.ranks[0].tensors if t.source is not None]
    assert [name for name, _, _ in source.reads] == order


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    """Equal for every tp size and dtype; another with one other value, or other settings; as given where known."""
    plans = [shard(tmp_path / "a"), shard(tmp_path / "b", tp_size=4)]
    source = llama_source()
    plans.append(write_shards(source, make_plan(source, 2, "bfloat16"), tmp_path / "c"))
    assert len({plan.fingerprint for plan in plans}) == 1
    changed = llama_source()
    changed.arrays["model.norm.weight"][3] += 1
    assert shard(tmp_path / "d", changed).fingerprint != plans[0].fingerprint
    assert shard(tmp_path / "e", llama_source(rope_theta=5e5)).fingerprint != plans[0].fingerprint
    same = llama_source(transformers_version="9.9", _name_or_path="/somewhere")
    assert shard(tmp_path / "f", same).fingerprint == plans[0].fingerprint
    known = llama_source()
    known.fingerprint = "hub:0123"
    assert shard(tmp_path / "g", known).fingerprint == "hub:0123"
    assert ShardSet.open(tmp_path / "g").plan.fingerprint == "hub:0123"


def test_plan_given_is_not_changed(tmp_path: Path) -> None:
    source = llama_source()
    plan = make_plan(source, 2)
    write_shards(source, plan, tmp_path / "out")
    assert plan == make_plan(source, 2)


def test_progress_ends_with_all(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    shard(tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == sum(a.nbytes for a in llama_source().arrays.values())


# --- values that are not acceptable -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_bad_values_leave_nothing(tmp_path: Path, bad: float, threads: int) -> None:
    source = llama_source()
    source.arrays["model.layers.1.mlp.down_proj.weight"][5, 7] = bad
    with pytest.raises(ValuesError, match=r"layers\.1\.mlp\.down_proj\.weight: holds Inf or NaN"):
        shard(tmp_path / "out", source, threads=threads)
    assert not (tmp_path / "out").exists()


def test_overflow_in_conversion_is_refused(tmp_path: Path) -> None:
    source = llama_source()
    source.arrays["lm_head.weight"][0, 0] = 1e6
    with pytest.raises(ValuesError, match=r"lm_head\.weight: the value 1e\+06 is too large for float16"):
        write_shards(source, make_plan(source, 2, "float16"), tmp_path / "out")


# --- folders ----------------------------------------------------------------------------------------------------------


def test_existing_set_needs_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shard(out, tp_size=4)
    before = content(out)
    with pytest.raises(UsageError, match="already holds a shard set"):
        shard(out, tp_size=2)
    running = hold(out)
    with pytest.raises(UsageError, match="is a shard set in use"):
        shard(out, tp_size=2, force=True)
    assert content(out) == before, "ranks that start would read files of two sets"
    del running
    shard(out, tp_size=2, force=True)
    shard(tmp_path / "fresh", tp_size=2)
    assert content(out) == content(tmp_path / "fresh")


def test_force_removes_small_files_of_the_old_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = llama_source()
    source.files = {**source.files, "chat_template.jinja": b"old"}
    shard(out, source)
    shard(out, force=True)
    assert not (out / "chat_template.jinja").exists()


@pytest.mark.parametrize("force", [False, True])
def test_other_folders_are_left_alone(tmp_path: Path, force: bool) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plan.json").write_text('{"tool": "terraform"}')
    with pytest.raises(UsageError, match="not empty and not a shard set"):
        shard(tmp_path, force=force)
    assert sorted(content(tmp_path)) == ["notes.txt", "plan.json"]


def test_damaged_set_can_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shard(out)
    (out / "plan.json").write_bytes(b"{")
    shard(out, force=True)
    ShardSet.open(out)


def test_files_of_others_survive_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shard(out)
    (out / "README.md").write_text("mine")
    shard(out, force=True)
    assert (out / "README.md").read_text() == "mine"


def test_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shard(tmp_path / "empty")
    shard(tmp_path / "a" / "b" / "c")


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Not a directory"):
        shard(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="target does not exist"):
        shard(tmp_path / "dangling")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("where", ["model", "model/sub", "link", "model/../model"])
def test_out_must_not_touch_the_source(tmp_path: Path, where: str, force: bool) -> None:
    model = write_llama(tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    before = content(model)
    source = open_source(str(model))
    with pytest.raises(UsageError, match="checkpoint"):
        write_shards(source, make_plan(source, 2), tmp_path / where, force=force)
    assert content(model) == before


def test_out_must_not_hold_the_source(tmp_path: Path) -> None:
    """A set that is cut again into a folder around it would be removed by its own --force."""
    outer = tmp_path / "outer"
    shard(outer)
    inner = write_llama(outer / "inner")
    source = open_source(str(inner))
    with pytest.raises(UsageError, match="holds the checkpoint"):
        write_shards(source, make_plan(source, 2), outer, force=True)


def test_read_only_source(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    source = open_source(str(model))
    write_shards(source, make_plan(source, 2), tmp_path / "out")
    model.chmod(0o755)


def test_default_folder() -> None:
    assert default_folder("org/Llama-3-8B", 4) == Path("Llama-3-8B-tp4")
    assert default_folder("/models/x.Q4_0.gguf", 2) == Path("x.Q4_0-tp2")
    assert default_folder("old-tp4/", 2) == Path("old-tp2")


# --- two runs at once, no room ----------------------------------------------------------------------------------------


def test_second_run_is_told_who_is_writing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is being written by process 4711"):
            shard(out)
    shard(out)  # the lock ended with its holder, though the file is still there
    assert not (out / ".lock").exists()


def test_lock_is_held_while_writing(tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def progress(done: int, total: int) -> None:
        with pytest.raises(UsageError) as caught:
            shard(out)
        refused.append(caught.value.message)

    shard(out, progress=progress)
    assert refused and all(f"process {os.getpid()}" in message for message in refused)


def test_too_little_space_is_seen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(output_folder.os, "statvfs", lambda path: Full)
    with pytest.raises(MgtpError, match=r"no space left on device: .* are needed, 40960 are free"):
        shard(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_read_only_leaves_nothing_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path / "out")

    def read_only(path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(output_folder, "_lock", read_only)
    with pytest.raises(MgtpError, match="cannot be written: read-only file system") as caught:
        shard(tmp_path / "out", force=True)
    assert caught.value.hint == "name a folder that you can write to"


@pytest.mark.parametrize("threads", [1, 3])
def test_full_disk_leaves_something_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """The system says 'no space' in the middle, as it does when others write too: no final name, and it goes on later."""
    out, room = tmp_path / "out", 150_000
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if offset + len(data) > room:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(MgtpError, match="out: cannot be written: no space left on device") as caught:
            shard(out, threads=threads)
    assert "continues where it stopped" in caught.value.hint
    assert all(name.endswith(".partial") or name == ".journal" for name in content(out))
    shard(out)
    shard(tmp_path / "fresh")
    assert content(out) == content(tmp_path / "fresh")


def test_small_tmpfs(tmp_path: Path) -> None:
    """A real file system that is too small: refused at once, or one line when others fill it meanwhile."""
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=1m tmpfs {small} 2>/dev/null") != 0:
        pytest.skip("needs to mount a tmpfs")
    try:
        with pytest.raises(MgtpError, match="no space left on device"):
            shard(small / "out", llama_source(vocab_size=4000))
        assert list(small.iterdir()) == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "claim", _claim_without_space_check)
            with pytest.raises(MgtpError, match="no space left on device"):
                shard(small / "out", llama_source(vocab_size=4000))
        assert all(p.name == ".journal" or p.name.endswith(".partial") for p in (small / "out").iterdir())
    finally:
        os.system(f"umount {small}")


def _claim_without_space_check(out: Path, key: str, needed: int, num_ranks: int, *, force: bool) -> Any:
    return output_folder.claim(out, key, 0, num_ranks, force=force)


def test_plan_file_is_decodable(tmp_path: Path) -> None:
    plan = shard(tmp_path / "out")
    path = tmp_path / "out" / "plan.json"
    assert decode_plan(path.read_bytes(), path) == plan


def test_tokenizer_files_are_carried_along(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    write_tokenizer(model)
    source = open_source(str(model))
    write_shards(source, make_plan(source, 2), tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
