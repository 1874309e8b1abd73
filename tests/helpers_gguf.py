"""Writes tiny GGUF files: a model of two layers with a vocabulary of a few hundred tokens, in every supported form.

Sizes: hidden 256 (one block of every K-quant), 4 heads, 2 kv heads, ffn 512.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType

from mgtp.shardplan.sources.gguf import GgufSource, open_gguf

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 256, 4, 2, 512, 2
HEAD_DIM = {"llama": 64, "qwen2": 64, "qwen3": 128, "gemma3": 32}
CONTEXT = 4096


def bytes_to_characters() -> dict[int, str]:
    """GPT-2's alphabet: a printable character for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def byte_level_vocab(pre: str = "gpt-2") -> dict[str, Any]:
    """Tokenizer metadata of a byte-level BPE: 3 control tokens, 256 bytes, some merges, a user-defined and a pad token."""
    merges = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "Ġ w",
        "Ġw o",
        "r l",
        "1 2",
        "12 3",
        "Ġ Ġ",
        "t h",
        "th e",
        "Ġ the",
        "Ċ Ċ",
    ]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_characters().values()]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<think>", "[PAD]"]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 5)
    types += [TokenType.USER_DEFINED, TokenType.UNUSED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def sentencepiece_vocab(pieces: Iterable[tuple[str, float, int]] | None = None) -> dict[str, Any]:
    """Tokenizer metadata of a SentencePiece model, from (text, score, type); a small one of its own by default."""
    if pieces is None:
        words = [
            "▁",
            "h",
            "e",
            "l",
            "o",
            "w",
            "r",
            "d",
            "he",
            "ll",
            "hell",
            "hello",
            "▁hello",
            "▁w",
            "or",
            "ld",
            "▁world",
        ]
        pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
        pieces += [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
        pieces += [(word, -float(i), 1) for i, word in enumerate(words)]
    tokens, scores, types = (list(column) for column in zip(*pieces, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }


def tiny_metadata(arch: str) -> dict[str, Any]:
    """Metadata of the tiny model, tokenizer included."""
    vocab = sentencepiece_vocab() if arch == "gemma3" else byte_level_vocab("qwen2" if "qwen" in arch else "gpt-2")
    return vocab | {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM[arch],
        f"{arch}.attention.value_length": HEAD_DIM[arch],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 500000.0,
    }


def tiny_tensors(arch: str, num_tokens: int, seed: int = 0, biases: bool | None = None) -> dict[str, np.ndarray]:
    """Float32 tensors under GGUF names, in the shapes that PyTorch would have."""
    rng = np.random.default_rng(seed)
    head = HEAD_DIM[arch]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (num_tokens, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * head, HIDDEN),
            "attn_k.weight": (KV_HEADS * head, HIDDEN),
            "attn_v.weight": (KV_HEADS * head, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * head),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "gemma3":
            block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        if arch in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        with_bias = ["attn_q", "attn_k", "attn_v"] if arch == "qwen2" else []
        if biases:
            with_bias = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
        block |= {f"{name}.bias": block[f"{name}.weight"][:1] for name in with_bias}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Raw rows [n, row_bytes] of a quantised tensor of `shape`: random bits, whatever values they stand for."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // block * block_bytes), np.uint8)


def write_gguf(
    path: Path,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    biases: bool = False,
) -> Path:
    """Write a tiny GGUF file and return its path.

    `metadata` and `tensors` change what the tiny model has; a value of None takes the entry out. `types` stores a
    tensor in another type: float32 arrays are converted, others are that type already.
    """
    values = {key: v for key, v in (tiny_metadata(arch) | dict(metadata or {})).items() if v is not None}
    num_tokens = len(values.get("tokenizer.ggml.tokens", [0] * 8))
    arrays = dict(tiny_tensors(arch, num_tokens, biases=biases)) | dict(tensors or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", arch))
    for key, value in values.items():
        _add_value(writer, key, value)
    for name, array in arrays.items():
        if array is None:
            continue
        kind = (types or {}).get(name)
        if kind is not None and array.dtype == np.float32:
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_tiny(folder: Path, arch: str = "llama", **changes: Any) -> GgufSource:
    """The source of a tiny file that is written with `changes` (see write_gguf)."""
    return open_gguf(write_gguf(folder / "m.gguf", arch, **changes), "m")


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)
