"""Which file a tensor is taken from: the index is the authority, and a checkpoint that is not whole is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mgtp.shardplan.planner import match
from mgtp.shardplan.sources import open_source
from tests.opening import refusal, whole
from tests.tiny import INDEX, llama_config, llama_tensors, write_json, write_llama

DOWN_0 = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A checkpoint of three files with an index."""
    return write_llama(tmp_path / "parts", files=3)


def test_a_stale_copy_is_ignored_and_counted(parts: Path) -> None:
    """An overlay file holds the good tensor, the old file a stale one: the index decides."""
    index = json.loads((parts / INDEX).read_text())
    file = parts / index["weight_map"][DOWN_0]
    tensors = load_file(file)
    good = tensors[DOWN_0].copy()
    tensors[DOWN_0][:] = 9.0
    save_file(tensors, file)
    save_file({DOWN_0: good}, parts / "model-overlay.safetensors")
    index["weight_map"][DOWN_0] = "model-overlay.safetensors"
    write_json(parts / INDEX, index)
    source = open_source(str(parts))
    assert np.array_equal(whole(source, DOWN_0), good)
    assert list(source.notes) == ["ignored 1 tensor stored again in a file other than the one the index names"]


def test_unlisted_files_and_tensors_are_ignored_with_one_note_each(parts: Path) -> None:
    index = json.loads((parts / INDEX).read_text())
    file = parts / index["weight_map"][DOWN_0]
    save_file({**load_file(file), "mtp.x": np.zeros(3), "other": np.zeros(3)}, file)
    save_file({DOWN_0: np.zeros(3)}, parts / "model.safetensors")
    (parts / "broken.safetensors").write_text("never opened")
    source = open_source(str(parts))
    assert source.tensors[DOWN_0].shape == (64, 128)
    assert list(source.notes) == [
        "ignored 2 tensors that the index does not name",
        "ignored 2 safetensors files outside the checkpoint: broken.safetensors, model.safetensors",
    ]
    match(source)


def test_every_missing_file_is_listed(parts: Path) -> None:
    for i in (1, 3):
        (parts / f"model-0000{i}-of-00003.safetensors").unlink()
    error = refusal(parts)
    assert "missing 2 of 3 files in model.safetensors.index.json: model-00001" in error.message
    assert "model-00003-of-00003.safetensors" in error.message


def test_every_tensor_that_its_file_lacks_is_listed(parts: Path) -> None:
    index = json.loads((parts / INDEX).read_text())
    file = index["weight_map"][DOWN_0]
    absent = ["model.layers.9.mlp.up_proj.weight", "model.layers.8.mlp.up_proj.weight"]
    write_json(parts / INDEX, {"weight_map": {**index["weight_map"], **dict.fromkeys(absent, file)}})
    message = refusal(parts).message
    assert "2 tensors not in the file that model.safetensors.index.json names" in message
    assert all(f"{name} ({file})" in message for name in absent)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/../../x", "", ".", "..", "a//b", "a\0b", 3, None]
)
def test_file_names_that_leave_the_folder_are_refused(parts: Path, file: object) -> None:
    index = json.loads((parts / INDEX).read_text())
    index["weight_map"][DOWN_0] = file
    write_json(parts / INDEX, index)
    error = refusal(parts)
    assert DOWN_0 in error.message
    assert "which is not a file of the folder" in error.message


def test_files_in_a_subfolder_and_behind_links_are_fine(parts: Path) -> None:
    index = json.loads((parts / INDEX).read_text())
    file = index["weight_map"][DOWN_0]
    (parts / "sub").mkdir()
    (parts / file).rename(parts.parent / "blob")
    (parts / "sub" / file).symlink_to(parts.parent / "blob")
    weight_map = {name: f"sub/{f}" if f == file else f for name, f in index["weight_map"].items()}
    write_json(parts / INDEX, {"weight_map": weight_map})
    assert np.array_equal(whole(open_source(str(parts)), DOWN_0), llama_tensors(llama_config())[DOWN_0])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": "x", "a": "y"}}',
     "<html>", "version https://git-lfs.github.com/spec/v1\n", pytest.param("[" * 100_000, id="deep")],
)  # fmt: skip
def test_a_malformed_index_is_refused(parts: Path, content: str) -> None:
    (parts / INDEX).write_text(content)
    assert INDEX in refusal(parts).message


# --- which file, without an index


def test_one_file_of_any_name_will_do(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert len(match(open_source(str(folder))).specs) == 21


def test_several_files_without_an_index_are_refused(parts: Path) -> None:
    (parts / INDEX).unlink()
    error = refusal(parts)
    assert "model.safetensors.index.json is missing" in error.message
    assert "model-00003-of-00003.safetensors" in error.message
    for i in (2, 3):
        (parts / f"model-0000{i}-of-00003.safetensors").unlink()
    assert "model.safetensors.index.json is missing" in refusal(parts).message  # one part of three is not a model


def test_pickled_weights_are_refused_with_the_way_to_convert(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(folder)
    assert "PyTorch files" in error.message
    assert "save_pretrained" in error.hint


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"lora_A": np.zeros(3)}, tmp_path / "adapter_model.safetensors")
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
    error = refusal(tmp_path)
    assert "LoRA adapter" in error.message
    assert "merge" in error.hint
    folder = write_llama(tmp_path)
    assert list(open_source(str(folder)).notes) == [
        "ignored 1 safetensors file outside the checkpoint: adapter_model.safetensors",
        "ignored adapter_config.json: the adapter beside the model is not applied",
    ]


def test_rank_files_without_a_plan_are_an_unfinished_shard_set(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "rank-0-of-2.safetensors")
    assert "not finished" in refusal(folder).message


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors file" in refusal(folder).message
