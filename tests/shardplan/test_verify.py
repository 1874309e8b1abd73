"""Every damaged tensor is found and named, and a set is compared with its checkpoint bit for bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.shard_set import ShardSet, open_plan
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.verify import verify_against, verify_folder, verify_set
from mgtp.shardplan.writer import write_shards
from tests.shardplan.memory_source import MemorySource, llama_source
from tests.tiny import write_llama


def shard(out: Path, source: MemorySource, tp_size: int = 3, dtype: str = "auto") -> ShardSet:
    write_shards(source, make_plan(source, tp_size, dtype), out)
    return ShardSet.open(out)


def test_sound_set_has_no_faults(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    shard_set = shard(tmp_path / "out", llama_source())
    assert verify_set(shard_set, lambda done, total: seen.append((done, total))) == []
    size = sum(rank.bytes - rank.data_offset for rank in shard_set.plan.ranks)
    assert seen[-1] == (size, size)


def test_every_flip_is_found_and_named(tmp_path: Path) -> None:
    """One bit anywhere behind the header, padding included."""
    shard_set = shard(tmp_path / "out", llama_source(num_hidden_layers=1, hidden_size=30, head_dim=4))
    choose = random.Random(5)
    for _ in range(60):
        rank = choose.choice(shard_set.plan.ranks)
        tensor = choose.choice(rank.tensors)
        path = shard_set.path / rank.file
        original = path.read_bytes()
        changed = bytearray(original)
        changed[rank.data_offset + tensor.offset + choose.randrange(tensor.bytes)] ^= 1 << choose.randrange(8)
        path.write_bytes(changed)
        faults = verify_set(shard_set, threads=choose.choice((1, 4)))
        assert [(f.file, f.tensor) for f in faults] == [(rank.file, tensor.name)]
        path.write_bytes(original)


def test_a_damaged_plan_beside_one_rank_alone(tmp_path: Path) -> None:
    """Without config.json nothing says what the plan should be: it is refused or does not match the file, or is sound."""
    shard_set = shard(tmp_path / "out", llama_source(num_hidden_layers=1, hidden_size=30, head_dim=4))
    for name in ("config.json", "rank-0-of-3.safetensors", "rank-2-of-3.safetensors"):
        (shard_set.path / name).unlink(missing_ok=True)
    plan = shard_set.path / "plan.json"
    original = plan.read_bytes()
    assert verify_folder(open_plan(shard_set.path), 1) == []
    choose, found, refusals = random.Random(8), 0, []
    for _ in range(300):
        changed = bytearray(original)
        for _ in range(choose.randint(1, 3)):
            at = choose.randrange(len(changed))
            changed[at] = choose.choice(b'0123456789-"[]{}abcf') if choose.random() < 0.8 else choose.randrange(256)
        plan.write_bytes(changed)
        try:
            found += bool(verify_folder(open_plan(shard_set.path), 1))
        except CheckpointError as error:
            refusals.append(error)
    assert all(error.hint and "\n" not in error.message for error in refusals)
    assert found + len(refusals) > 50


def test_file_cut_after_opening(tmp_path: Path) -> None:
    shard_set = shard(tmp_path / "out", llama_source())
    path = shard_set.rank_path(1)
    path.write_bytes(path.read_bytes()[:-10])
    size = shard_set.plan.ranks[1].bytes
    reason = f"{size - 10} bytes, the plan says {size}"
    assert [(f.file, f.reason) for f in verify_set(shard_set)] == [(path.name, reason)]


def test_missing_short_and_swapped_files_are_all_named(tmp_path: Path) -> None:
    """A file that is not the plan's is one fault; the others are hashed all the same."""
    shard_set = shard(tmp_path / "out", llama_source(), 4)
    paths = [shard_set.rank_path(r) for r in range(4)]
    paths[0].unlink()
    os.truncate(paths[1], 0)
    paths[2].write_bytes(paths[3].read_bytes())
    tensor = shard_set.plan.ranks[3].tensors[0]
    changed = bytearray(paths[3].read_bytes())
    changed[shard_set.plan.ranks[3].data_offset + tensor.offset] ^= 1
    paths[3].write_bytes(changed)
    faults = verify_folder(open_plan(tmp_path / "out"))
    assert [(f.file, f.tensor) for f in faults] == [*((p.name, "") for p in paths[:3]), (paths[3].name, tensor.name)]
    assert [f.reason for f in faults] == [
        "no such file",
        f"0 bytes, the plan says {shard_set.plan.ranks[1].bytes}",
        "is rank 3 of 4, not rank 2 of 4",
        "does not have the plan's hash",
    ]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("tp_size", [1, 3, 8])
def test_equals_its_checkpoint(tmp_path: Path, dtype: str, tp_size: int) -> None:
    source = llama_source(vocab_size=331, attention_bias=True)
    assert verify_against(shard(tmp_path / "out", source, tp_size, dtype), source) == []


def test_equals_itself_cut_otherwise(tmp_path: Path) -> None:
    source = llama_source("bfloat16")
    shard_set = shard(tmp_path / "a", source, 2)
    shard(tmp_path / "b", source, 5)
    assert verify_against(shard_set, open_source(str(tmp_path / "b"))) == []


def test_one_other_value_is_found(tmp_path: Path) -> None:
    """In every rank that has it, and nowhere else; a difference that the conversion rounds away is none."""
    source = llama_source()
    shard_set, half = shard(tmp_path / "a", source, 4), shard(tmp_path / "b", source, 4, "bfloat16")
    name = "model.layers.1.self_attn.k_proj.weight"
    source.arrays[name][0, 0] *= 1.0001
    faults = verify_against(shard_set, source)
    assert [(f.file, f.tensor) for f in faults] == [("rank-0-of-4.safetensors", name)]
    assert verify_against(half, source) == []
    source.arrays["model.norm.weight"][1] += 1
    assert len(verify_against(shard_set, source)) == 1 + 4


def test_other_models_are_told_apart(tmp_path: Path) -> None:
    shard_set = shard(tmp_path / "a", llama_source())
    wider = verify_against(shard_set, llama_source(intermediate_size=160))
    assert "the checkpoint's has shape" in " ".join(f.reason for f in wider)
    assert any(f.file == "config.json" for f in wider)
    tied = verify_against(shard_set, llama_source(tie_word_embeddings=True))
    assert any(f.tensor == "lm_head.weight" and "no such tensor" in f.reason for f in tied)
    untied = verify_against(shard(tmp_path / "b", llama_source(tie_word_embeddings=True)), llama_source())
    assert any(f.tensor == "lm_head.weight" and "is missing" in f.reason for f in untied)


def test_small_files_are_compared(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    source = open_source(str(model))
    write_shards(source, make_plan(source, 2), tmp_path / "out")
    shard_set = ShardSet.open(tmp_path / "out")
    (model / "generation_config.json").write_text('{"eos_token_id": 3}')
    faults = verify_against(shard_set, open_source(str(model)))
    assert [(f.file, f.tensor) for f in faults] == [("generation_config.json", "")]
