"""GGUF files as checkpoints: the values are those that the original Hugging Face checkpoint had.

References: gguf-py's own reader and dequantisation, and llama.cpp's permutation written out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.sources import files, open_source
from mgtp.shardplan.sources.gguf import GgufSource, open_gguf
from mgtp.shardplan.sources.gguf_header import read_header
from tests.helpers_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, open_tiny, random_blocks, tiny_tensors, write_gguf

DOWN, HF_DOWN = "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"
QUANTISED = [
    Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K,
    Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ1_S, Type.IQ1_M, Type.IQ4_NL, Type.IQ4_XS,
    Type.TQ1_0, Type.TQ2_0, Type.MXFP4,
]  # fmt: skip


def whole(source: GgufSource, name: str) -> np.ndarray:
    shape = source.tensors[name].shape
    return source.rows(name, 0, shape[0]).reshape(shape)


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows of arch llama."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_rows_are_what_gguf_py_makes_of_the_tensor(tmp_path: Path, kind: Type) -> None:
    blocks = random_blocks(kind, (HIDDEN, 512))
    source = open_tiny(tmp_path, tensors={DOWN: blocks}, types={DOWN: kind})
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind)
    info = source.tensors[HF_DOWN]
    assert (info.dtype, info.shape) == ("F32", (HIDDEN, 512))
    for start, stop in [(0, HIDDEN), (0, 1), (17, 40), (HIDDEN - 1, HIDDEN), (5, 5)]:
        rows = source.rows(HF_DOWN, start, stop)
        assert (rows.dtype, rows.shape, rows.flags.c_contiguous) == (np.float32, (stop - start, 512), True)
        assert np.array_equal(rows.view("u4"), expected[start:stop].view("u4"))


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        (Type.F64, "F64", "f8"),
        (Type.F32, "F32", "f4"),
        (Type.F16, "F16", "f2"),
        (Type.BF16, "BF16", ml_dtypes.bfloat16),
    ],
)
def test_plain_types_keep_their_dtype_and_bits(tmp_path: Path, kind: Type, name: str, dtype: Any) -> None:
    values = np.random.default_rng(1).standard_normal((HIDDEN, 512)).astype(dtype)
    stored = values.view("u1") if kind == Type.BF16 else values
    source = open_tiny(tmp_path, tensors={DOWN: stored}, types={DOWN: kind})
    assert source.tensors[HF_DOWN].dtype == name
    rows = source.rows(HF_DOWN, 3, 9)
    assert rows.flags.writeable
    assert np.array_equal(rows.view("u1"), values[3:9].view("u1"))


def test_q_and_k_rows_come_out_in_hugging_face_order_for_any_range(tmp_path: Path) -> None:
    """Guards ranges that begin or end inside a head, whose rows lie spread over the head in the file."""
    rng = np.random.default_rng(2)
    stored, originals = {}, {}
    for p, heads in (("q", HEADS), ("k", KV_HEADS)):
        for kind, columns in (("weight", (HIDDEN,)), ("bias", ())):
            values = rng.standard_normal((heads * HEAD_DIM["llama"], *columns), np.float32)
            stored[f"blk.0.attn_{p}.{kind}"] = interleave(values, heads)
            originals[f"model.layers.0.self_attn.{p}_proj.{kind}"] = values.reshape(len(values), -1)
    source = open_tiny(tmp_path, tensors=stored, biases=True)
    for name, values in originals.items():
        for start, stop in [
            (0, len(values)),
            (0, 1),
            (1, 2),
            (31, 33),
            (63, 65),
            (5, 100),
            (64, 128),
            (127, 128),
            (9, 9),
        ]:
            assert np.array_equal(source.rows(name, start, stop), values[start:stop]), (name, start)


def test_quantised_q_rows_come_out_in_hugging_face_order(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((HEADS * 64, HIDDEN)).astype(np.float32)
    blocks = gguf.quants.quantize(values, Type.Q8_0)
    name = "blk.0.attn_q.weight"
    source = open_tiny(tmp_path, tensors={name: interleave(blocks, HEADS)}, types={name: Type.Q8_0})
    assert np.array_equal(
        source.rows("model.layers.0.self_attn.q_proj.weight", 20, 90), gguf.quants.dequantize(blocks, Type.Q8_0)[20:90]
    )


def test_only_llama_has_its_heads_interleaved(tmp_path: Path) -> None:
    for arch in ("qwen2", "qwen3", "gemma3"):
        source = open_tiny(tmp_path, arch)
        stored = tiny_tensors(arch, source.config["vocab_size"])
        assert np.array_equal(whole(source, "model.layers.1.self_attn.k_proj.weight"), stored["blk.1.attn_k.weight"])


@pytest.mark.parametrize("kind", [Type.F32, Type.F16], ids=lambda kind: kind.name)
def test_gemma_norms_lose_the_one_that_the_converter_added(tmp_path: Path, kind: Type) -> None:
    names = {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
        "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
        "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm",
    }
    rng = np.random.default_rng(4)
    stored = {f"{n}.weight": rng.standard_normal(32 if "_q_" in n or "_k_" in n else HIDDEN, np.float32) for n in names}
    source = open_tiny(tmp_path, "gemma3", tensors=stored, types=dict.fromkeys(stored, kind))
    for name, original in names.items():
        values = gguf.quants.quantize(stored[f"{name}.weight"], kind).astype(np.float32)
        info = source.tensors[f"{original}.weight"]
        assert (info.dtype, info.shape) == ("F32", values.shape)
        assert np.array_equal(source.rows(info.name, 2, len(values)), values[2:, None] - np.float32(1))


def test_only_the_rows_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_tiny(tmp_path, types={"token_embd.weight": Type.Q8_0})
    read = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[Any], offset: int) -> int:
        read.append(sum(len(b) for b in buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", counting)
    source.rows("model.embed_tokens.weight", 10, 12)
    assert sum(read) == 2 * HIDDEN // 32 * 34
    read.clear()
    source.rows("model.layers.0.self_attn.q_proj.weight", 70, 80)
    assert sum(read) <= 64 * HIDDEN * 4


# --- the source as such -----------------------------------------------------------------------------------------------


def test_small_files(tmp_path: Path) -> None:
    metadata = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eot_token_id": 0,
    }
    source = open_tiny(tmp_path, metadata=metadata)
    assert sorted(source.files) == [
        "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads(source.files["config.json"]) == source.config
    assert source.files["chat_template.jinja"].startswith(b"{% for m")
    assert json.loads(source.files["generation_config.json"]) == {
        "bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0, "temperature": 0.6, "top_k": 20,
    }  # fmt: skip
    tokenizer_config = json.loads(source.files["tokenizer_config.json"])
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert tokenizer_config["clean_up_tokenization_spaces"] is False
    assert (tokenizer_config["add_bos_token"], tokenizer_config["model_max_length"]) == (False, 4096)


def test_identity_changes_with_the_file_and_a_changed_file_is_not_read(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    again = open_gguf(source.path, "m")
    assert source.identity() == again.identity()
    assert source.fingerprint is None
    os.utime(source.path, ns=(1, 1))
    assert open_gguf(source.path, "m").identity() != source.identity()
    for name in (HF_DOWN, "model.norm.weight"):
        with pytest.raises(CheckpointError, match="changed while it was read"):
            source.rows(name, 0, 1)
    source.close()


def test_open_source_knows_gguf_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    source = open_source(str(path))
    assert (source.label, source.has_weights, len(source.tensors)) == (str(path), True, 20)


def test_the_header_is_read_as_gguf_py_reads_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", types={DOWN: Type.Q4_0})
    reader = gguf.GGUFReader(path)
    with open(path, "rb") as file:
        metadata, tensors = read_header(file, path.stat().st_size, "m")
    assert [(t.name, t.tensor_type, tuple(t.shape[::-1]), t.data_offset, t.n_bytes) for t in reader.tensors] == [
        (t.name, t.type, t.shape, t.offset, t.nbytes) for t in tensors.values()
    ]
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value, theirs = metadata._values[key], field.contents()
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == (pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else theirs), key


def test_opening_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from pathlib import Path; from mgtp.shardplan.sources.gguf import open_gguf\n"
        f"source = open_gguf(Path({str(path)!r}), 'm'); source.files['tokenizer.json']\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
