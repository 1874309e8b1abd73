"""Cutting a shard set again gives byte for byte what cutting its checkpoint gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mgtp.shardplan.errors import CheckpointError, UsageError
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.writer import write_shards
from tests.tiny import write_llama, write_tokenizer


def shard(model: Path, out: Path, tp_size: int, dtype: str = "auto", shares: tuple[int, ...] = ()) -> Path:
    source = open_source(str(model))
    write_shards(source, make_plan(source, tp_size, dtype, shares), out)
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 2), (2, 8), (8, 3), (3, 1), (8, 8)])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_resharding_equals_sharding_the_checkpoint(tmp_path: Path, first: int, second: int, dtype: str) -> None:
    """kv heads are copied from 4 ranks on; 320 rows and 129 columns do not divide by 3 or 8; bf16 rounds float32."""
    model = write_llama(tmp_path / "m", kv=2, ffn=129, attention_bias=True)
    write_tokenizer(model)
    between = shard(model, tmp_path / "between", first, dtype)
    assert content(shard(between, tmp_path / "again", second)) == content(
        shard(model, tmp_path / "once", second, dtype)
    )


def test_unequal_shares(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m")
    between = shard(model, tmp_path / "between", 3, shares=(4, 1, 2))
    assert content(shard(between, tmp_path / "again", 2, shares=(1, 3))) == content(
        shard(model, tmp_path / "once", 2, shares=(1, 3))
    )


def test_rows_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m", kv=2, dtype="bfloat16")
    checkpoint = open_source(str(model))
    for n in (1, 3, 8):
        source = open_source(str(shard(model, tmp_path / str(n), n)))
        assert source.tensors.keys() == checkpoint.tensors.keys()
        for name, info in checkpoint.tensors.items():
            assert source.tensors[name] == info
            num_rows = info.shape[0]
            for start, stop in [(0, num_rows), (1, num_rows - 1), (num_rows // 2, num_rows // 2 + 1), (5, 5)]:
                found, expected = source.rows(name, start, stop), checkpoint.rows(name, start, stop)
                assert found.flags.c_contiguous
                assert found.shape == expected.shape
                assert found.tobytes() == expected.tobytes()


def test_a_tied_model_stays_tied(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m", tied=True)
    between = shard(model, tmp_path / "between", 4)
    assert content(shard(between, tmp_path / "again", 2)) == content(shard(model, tmp_path / "once", 2))


def test_a_head_of_its_own_stays_apart_though_conversion_makes_it_equal(tmp_path: Path) -> None:
    """Flagged as tied, with a head that differs only beyond bf16's precision: decided once, from the checkpoint."""
    model = write_llama(tmp_path / "m", tied=True)
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].astype(np.float16).astype(np.float32)
    head = np.nextafter(embedding, np.float32(np.inf))
    save_file({**tensors, "model.embed_tokens.weight": embedding, "lm_head.weight": head}, model / "model.safetensors")
    between = shard(model, tmp_path / "between", 4, "float16")
    assert content(shard(between, tmp_path / "again", 2)) == content(shard(model, tmp_path / "once", 2, "float16"))
    plan = make_plan(open_source(str(between)), 2)
    assert plan.ties == {}
    assert sum("lm_head" in note for note in plan.notes) == 1


def test_rounded_values_are_not_passed_off_as_another_dtype(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m")
    rounded = open_source(str(shard(model, tmp_path / "bf16", 2, "bfloat16")))
    with pytest.raises(UsageError, match="was converted from F32 to bfloat16") as caught:
        make_plan(rounded, 2, "float32")
    assert "--dtype bfloat16" in caught.value.hint
    exact = shard(model, tmp_path / "f32", 2)
    assert content(shard(exact, tmp_path / "a", 4, "bfloat16")) == content(shard(model, tmp_path / "b", 4, "bfloat16"))


def test_a_damaged_set_is_refused_and_a_change_while_reading_is_seen(tmp_path: Path) -> None:
    between = shard(write_llama(tmp_path / "m"), tmp_path / "between", 2)
    source = open_source(str(between))
    identity = source.identity()
    file = between / "rank-1-of-2.safetensors"
    file.write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="changed while it was read"):
        source.rows("model.layers.0.mlp.down_proj.weight", 0, 2)
    assert open_source(str(between)).identity() != identity
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"rank-1-of-2"):
        open_source(str(between))
