"""GGUF files that cannot be read: one line that names the file and the reason, whatever the bytes are."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.sources.gguf import open_gguf
from tests.helpers_gguf import HIDDEN, KV_HEADS, random_blocks, tiny_metadata, write_gguf


def refusal(path: Path) -> CheckpointError:
    """The error with which a file is refused, checked to be one line that names the file, with a hint."""
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path, "m")
    assert caught.value.message.startswith(f"{path}: ")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"G", "not a GGUF file"),
        (b"hello world, this is text", "not a GGUF file, it begins with b'hello wo'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (b"\n<html>", "web page"),
        (b"tjgg\x03\0\0\0", "from before GGUF"),
        (b"\0" * 100, "unfinished download"),
        (b"GGUF", "damaged or cut"),
        (b"GGUF" + struct.pack("<I", 3), "damaged or cut"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "9223372036854775808 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "1099511627776 metadata entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "'general.architecture' is missing"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + b"x" * 9, "a string of 4611686018427387904 bytes"),
    ],
)
def test_files_that_are_not_a_gguf_model(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert reason in refusal(path).message


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "dir.gguf").mkdir()
    for name in ("pipe.gguf", "dir.gguf", "missing.gguf"):
        refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("arch", "metadata", "reason"),
    [
        ("llama", {"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ("llama", {"general.type": "adapter"}, "a GGUF 'adapter', not a model"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
        ("llama", {"llama.expert_count": 8}, "llama.expert_count is 8: mixture-of-experts"),
        ("llama", {"llama.logit_scale": 8.0}, "llama.logit_scale is 8"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50"),
        ("llama", {"llama.attention.causal": False}, "does not generate text"),
        ("llama", {"llama.rope.dimension_count": 32}, "rope.dimension_count is 32, but heads are 64 wide"),
        ("llama", {"llama.attention.value_length": 32}, "value_length is 32"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ("qwen2", {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 0.5}, "factor is 0.5"),
        ("llama", {"llama.attention.head_count_kv": [1, 2]}, "differs from layer to layer"),
        ("llama", {"llama.block_count": 10**9}, "block_count is 1000000000"),
        ("llama", {"llama.block_count": 1}, "tensor 'blk.1."),
        ("llama", {"llama.block_count": "2"}, "must be a non-negative integer, at most 2147483647, not '2'"),
        ("llama", {"llama.block_count": 2**31}, "at most 2147483647, not 2147483648"),
        ("llama", {"llama.embedding_length": 128}, "'token_embd.weight' has 256 columns, the model 128"),
        ("llama", {"llama.attention.key_length": 48, "llama.attention.value_length": 48}, "not whole heads of 48"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": 0.0}, "must be a positive number, not 0.0"),
        ("llama", {"llama.rope.freq_base": float("nan")}, "must be a finite number"),
        ("gemma3", {"gemma3.attention.sliding_window": 4, "gemma3.attention.sliding_window_pattern": [True]}, "1 entry for"),
        ("llama", {"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ("llama", {"tokenizer.ggml.pre": "brand-new"}, "tokenizer.ggml.pre 'brand-new' is not supported"),
        ("llama", {"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "'a' is there twice"),
        ("llama", {"tokenizer.ggml.tokens": ["a", "b"]}, "has 275 entries for 2 tokens"),
        ("llama", {"tokenizer.ggml.tokens": ["a" * 5000]}, "a token of 5000 characters"),
        ("llama", {"tokenizer.ggml.eos_token_id": 10**6}, "is 1000000, beyond the 275 tokens"),
        ("llama", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "a bos token is to be added"),
        ("llama", {"tokenizer.ggml.add_bos_token": 1}, "must be true or false, not 1"),
    ],
)  # fmt: skip
def test_models_that_are_refused_by_name(tmp_path: Path, arch: str, metadata: dict[str, Any], reason: str) -> None:
    assert reason in refusal(write_gguf(tmp_path / "m.gguf", arch, metadata=metadata)).message


def test_a_refused_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"general.architecture": "mamba"})
    assert refusal(path).hint == "supported: llama, qwen2, qwen3, gemma3"


OPTIONAL = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base", "token_type",
    "bos_token_id", "eos_token_id", "pre", "tokenizer.chat_template",
)  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_missing_key_is_named(tmp_path: Path, arch: str) -> None:
    keys = [key for key in tiny_metadata(arch) if not key.endswith(OPTIONAL)]
    assert len(keys) >= 9
    for key in keys:
        assert f"'{key}' is missing" in refusal(write_gguf(tmp_path / "m.gguf", arch, metadata={key: None})).message


VECTOR, MATRIX = np.zeros(HIDDEN, np.float32), np.zeros((HIDDEN, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("arch", "tensors", "types", "reason"),
    [
        ("llama", {"blk.0.attn_rot_embd.weight": VECTOR}, {}, "tensor 'blk.0.attn_rot_embd.weight' is not one"),
        ("llama", {"blk.00.attn_norm.weight": VECTOR}, {}, "tensor 'blk.00.attn_norm.weight' is not one"),
        ("llama", {"blk.2.attn_norm.weight": VECTOR}, {}, "tensor 'blk.2.attn_norm.weight' is not one"),
        ("qwen2", {"blk.0.attn_output.bias": VECTOR}, {}, "tensor 'blk.0.attn_output.bias' is not one"),
        ("qwen3", {"rope_freqs.weight": VECTOR}, {}, "tensor 'rope_freqs.weight' is not one"),
        ("gemma3", {"blk.0.ffn_up.bias": VECTOR}, {}, "tensor 'blk.0.ffn_up.bias' is not one"),
        ("llama", {"token_embd.weight": None}, {}, "tensor 'token_embd.weight' is missing"),
        ("llama", {"blk.0.attn_q.bias": VECTOR}, {}, "q_proj have biases, k_proj, o_proj, v_proj have none"),
        ("llama", {"blk.0.ffn_up.weight": VECTOR}, {}, "tensor 'blk.0.ffn_up.weight' has shape [256], not 2 dimensions"),
        ("llama", {"output_norm.weight": MATRIX}, {}, "tensor 'output_norm.weight' has shape [256, 256]"),
        ("llama", {"output_norm.weight": VECTOR.astype(np.int32)}, {}, "'output_norm.weight' has type I32"),
        ("llama", {"blk.0.ffn_up.weight": random_blocks(Type.Q8_K, (512, 256))}, {"blk.0.ffn_up.weight": Type.Q8_K},
         "tensor 'blk.0.ffn_up.weight' has type Q8_K"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused_by_name(
    tmp_path: Path, arch: str, tensors: dict[str, Any], types: dict[str, Type], reason: str
) -> None:
    assert reason in refusal(write_gguf(tmp_path / "m.gguf", arch, tensors=tensors, types=types)).message


def header_only(path: Path) -> tuple[bytes, int]:
    """A tiny file cut down to few bytes: weights of one column, so that the header is most of it."""
    vectors = {f"blk.{i}.{n}_norm.weight": np.ones(4, np.float32) for i in range(2) for n in ("attn", "ffn")}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors: dict[str, Any] = {f"blk.{i}.{n}.weight": np.ones((4, 4), np.float32) for i in range(2) for n in matrices}
    tensors |= vectors | {
        "token_embd.weight": np.ones((275, 4), np.float32),
        "output_norm.weight": np.ones(4, np.float32),
    }
    sizes = {"embedding_length": 4, "attention.head_count": 2, "attention.head_count_kv": KV_HEADS}
    sizes |= {"attention.key_length": 2, "attention.value_length": 2}
    write_gguf(path, metadata={f"llama.{key}": value for key, value in sizes.items()}, tensors=tensors)
    content = path.read_bytes()
    source = open_gguf(path, "m")
    return content, min(weight.stored.offset for weight in source.weights.values())


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    content, _ = header_only(path)
    # The writer pads the end of the last tensor; the file is whole without that.
    end = max(weight.stored.offset + weight.stored.nbytes for weight in open_gguf(path, "m").weights.values())
    for size in sorted({*range(0, end, 37), end - 1}):
        path.write_bytes(content[:size])
        refusal(path)
    path.write_bytes(content[: end - 1])
    error = refusal(path)
    assert "was cut short" in error.message
    assert "again" in error.hint


def test_tensors_that_overlap_or_are_misplaced_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    content, _ = header_only(path)
    at = content.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16 + 4
    for offset, reason in [(0, "overlap"), (7, "not a multiple of 32"), (2**63, "cut short")]:
        path.write_bytes(content[:at] + struct.pack("<Q", offset) + content[at + 8 :])
        assert reason in refusal(path).message


def test_damaged_headers_give_an_error_and_nothing_else(tmp_path: Path) -> None:
    """Seeded damage: flipped bytes, huge and small counts, exchanged pieces. Opens, or is refused; memory stays small."""
    path = tmp_path / "m.gguf"
    content, header_size = header_only(path)
    rng = random.Random(7)
    opened, errors = 0, []
    tracemalloc.start()
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(4, header_size - 8) if rng.random() < 0.8 else rng.randrange(8, 200)
            kind = rng.randrange(4)
            if kind == 0:
                damaged[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                damaged[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1]))
            elif kind == 2:
                damaged[at : at + 4] = struct.pack("<I", rng.choice([0, 4, 6, 8, 9, 10, 12, 13, 255, 2**31]))
            else:
                other = rng.randrange(4, header_size - 24)
                damaged[at : at + 16] = damaged[other : other + 16]
        path.write_bytes(damaged)
        try:
            source = open_gguf(path, "m")
            source.files["tokenizer.json"]
            for name, info in source.tensors.items():
                assert source.rows(name, 0, 1).shape == (1, info.shape[1] if len(info.shape) > 1 else 1)
            opened += 1
        except CheckpointError as error:
            errors.append(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(error.hint and "\n" not in error.message for error in errors)
    assert 10 < opened < 500, "damage to names and texts goes unseen, damage to structure does not"
    assert peak < 32 << 20
