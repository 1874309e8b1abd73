"""Hugging Face folders: values bit for bit, small files verbatim, and one line for whatever is wrong with them."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.sources import open_source
from tests.opening import refusal, whole
from tests.tiny import INDEX, edit_json, llama_config, llama_tensors, write_json, write_llama, write_tokenizer

DOWN_0 = "model.layers.0.mlp.down_proj.weight"


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


@pytest.mark.parametrize(("content", "kind"), [("null", "null"), ("[]", "array"), ("1.5", "number")])
def test_json_that_is_no_object_is_called_by_its_json_name(tmp_path: Path, content: str, kind: str) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "config.json").write_text(content)
    assert f"holds a JSON {kind}, not an object" in refusal(folder).message


# --- names and shapes against the config


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "1 missing tensor: model.layers.1.self_attn.k_proj.weight" in refusal(folder).message


def test_a_renamed_tensor_is_named_both_ways(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_haed.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    found = "1 missing tensor: lm_head.weight; 1 tensor not part of this architecture: lm_haed.weight"
    assert found in refusal(folder).message
    save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    assert "base_model.model.lm_haed.weight" in refusal(folder).message
    assert "adapters" in refusal(folder).hint


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
