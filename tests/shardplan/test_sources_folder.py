"""Hugging Face folders: the index is the authority, and a checkpoint that is not whole is refused by name."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.planner import make_plan, match
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.sources.base import Source
from tests.tiny import INDEX, edit_json, llama_config, llama_tensors, write_json, write_llama, write_tokenizer

DOWN_0 = "model.layers.0.mlp.down_proj.weight"


def refusal(folder: Path) -> CheckpointError:
    """The error with which a checkpoint is refused, checked to be one line with a hint."""
    with pytest.raises(CheckpointError) as caught:
        match(open_source(str(folder)))
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def whole(source: Source, name: str) -> np.ndarray:
    shape = source.tensors[name].shape
    return source.rows(name, 0, shape[0]).reshape(shape)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A checkpoint of three files with an index."""
    return write_llama(tmp_path / "parts", files=3)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_tensor_is_read_bit_for_bit(tmp_path: Path, dtype: str, files: int) -> None:
    source = open_source(str(write_llama(tmp_path / "m", dtype=dtype, files=files)))
    for name, values in llama_tensors(llama_config(), dtype).items():
        assert np.array_equal(whole(source, name).view("u1"), values.view("u1"))
        part = source.rows(name, 3, 7)
        assert part.flags.c_contiguous
        assert np.array_equal(part.view("u1"), values.reshape(len(values), -1)[3:7].view("u1"))
    assert source.has_weights
    assert source.fingerprint is None
    assert list(source.notes) == []
    assert make_plan(source, 2).dtype == dtype


def test_reading_imports_neither_torch_nor_the_hub(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    code = (
        "import sys; from mgtp.shardplan.sources import open_source; from mgtp.shardplan.planner import make_plan;"
        f"make_plan(open_source({str(folder)!r}), 2);"
        "print(*{'torch', 'transformers', 'huggingface_hub', 'safetensors'} & sys.modules.keys())"
    )
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def test_scalars_count_as_one_row(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", llama_config())
    save_file({"x": np.array(3, np.float32)}, tmp_path / "model.safetensors")
    assert open_source(str(tmp_path)).rows("x", 0, 1).tolist() == [[3.0]]


def test_small_files_are_carried_verbatim(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}é")
    (folder / "tokenizer.model").write_bytes(b"\x0a\x00\xff")
    (folder / "README.md").write_text("not carried")
    source = open_source(str(folder))
    assert set(source.files) == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"
    }  # fmt: skip
    assert all(content == (folder / name).read_bytes() for name, content in source.files.items())


# --- the index is the authority


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
    assert list(source.notes) == ["ignored 1 tensors stored again in a file other than the one the index names"]


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
        "ignored 2 safetensors files that do not belong to it: broken.safetensors, model.safetensors",
    ]
    match(source)


def test_every_missing_file_is_listed(parts: Path) -> None:
    for i in (1, 3):
        (parts / f"model-0000{i}-of-00003.safetensors").unlink()
    error = refusal(parts)
    assert "2 of the 3 files in model.safetensors.index.json are missing: model-00001" in error.message
    assert "model-00003-of-00003.safetensors" in error.message


def test_every_tensor_that_its_file_lacks_is_listed(parts: Path) -> None:
    index = json.loads((parts / INDEX).read_text())
    file = index["weight_map"][DOWN_0]
    absent = ["model.layers.9.mlp.up_proj.weight", "model.layers.8.mlp.up_proj.weight"]
    write_json(parts / INDEX, {"weight_map": {**index["weight_map"], **dict.fromkeys(absent, file)}})
    message = refusal(parts).message
    assert "2 tensors are not in the file that model.safetensors.index.json names" in message
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
        "ignored 1 safetensors files that do not belong to it: adapter_model.safetensors",
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


# --- config and the other small files


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '"x"', "\0\0\0", '{"a": "\\ud800"}', "<html>", pytest.param("[" * 100_000, id="deep")],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_malformed_small_files_are_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / name).write_text(content)
    assert f"{folder / name}: " in refusal(folder).message


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(folder).message


def test_an_oversized_or_foreign_small_file_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer" in refusal(folder).message
    os.truncate(folder / "tokenizer.model", (64 << 20) + 1)
    assert "more than the 67108864" in refusal(folder).message
    (folder / "tokenizer.model").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(folder).message


# --- names and shapes against the config


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "1 tensors are missing: model.layers.1.self_attn.k_proj.weight" in refusal(folder).message


def test_an_untied_head_that_is_absent_is_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m", tied=True)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight is missing and tie_word_embeddings is false" in refusal(folder).message


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    edit_json(folder / "config.json", vocab_size=331)
    message = refusal(folder).message
    assert "model.embed_tokens.weight has shape [320, 64], config.json calls for [331, 64]" in message


@pytest.mark.parametrize("head", ["copy", "different", "scalar", "integer"])
def test_a_head_beside_tied_embeddings(tmp_path: Path, head: str) -> None:
    """A copy is dropped; a different head is used, untied, with a note; one of another shape or type is refused."""
    folder = write_llama(tmp_path / "m", tied=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    stored = {
        "copy": embedding,
        "different": embedding * 2,
        "scalar": np.array(1, np.float32),
        "integer": embedding.astype(np.int32),
    }
    save_file({**tensors, "lm_head.weight": stored[head]}, folder / "model.safetensors")
    if head in ("scalar", "integer"):
        assert "lm_head.weight" in refusal(folder).message
        return
    plan = make_plan(open_source(str(folder)), 2)
    assert plan.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if head == "copy" else {})
    assert any("lm_head" in note for note in plan.notes) == (head == "different")
    assert any(t.name == "lm_head.weight" for t in plan.ranks[0].tensors) == (head == "different")


# --- while it is read


def test_a_file_that_changes_after_opening_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    source = open_source(str(folder))
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        source.rows(DOWN_0, 0, 4)
    write_llama(folder, seed=1)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        source.rows(DOWN_0, 0, 4)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        source.rows(DOWN_0, 0, 4)


def test_an_io_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(write_llama(tmp_path / "m")))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        source.rows(DOWN_0, 0, 4)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="bytes too early"):
        source.rows(DOWN_0, 0, 4)


def test_rows_from_many_threads_leave_no_descriptor_open(tmp_path: Path) -> None:
    source = open_source(str(write_llama(tmp_path / "m", files=3)))
    expected = llama_tensors(llama_config())
    before, wrong = len(os.listdir("/proc/self/fd")), []

    def read() -> None:
        for name, values in expected.items():
            if not np.array_equal(whole(source, name), values):
                wrong.append(name)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source.close()
    assert not wrong
    assert len(os.listdir("/proc/self/fd")) == before


def test_identity_follows_the_files(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m", files=3)
    first = open_source(str(folder)).identity()
    assert open_source(str(folder)).identity() == first
    for name in ("config.json", INDEX, "model-00002-of-00003.safetensors"):
        os.utime(folder / name, ns=(1, 1))
        changed = open_source(str(folder)).identity()
        assert changed != first
        first = changed
