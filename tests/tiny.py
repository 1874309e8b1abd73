"""Tiny Llama checkpoints with random weights, written with numpy alone: for tests of files that need no torch.

write_llama(folder, heads=8, kv=4, dtype="bfloat16")                one file
write_llama(folder, files=3)                                        three files and an index
write_tokenizer(folder, ordinary=256, special=("<s>", "</s>"))      a byte-level tokenizer.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of the default checkpoint, with `changes`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        **changes,
    }


def llama_tensors(config: dict[str, Any], dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors for `config`, in `dtype` (float64, float32, float16 or bfloat16)."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {f"{p}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for name, count in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (count * head_dim, hidden)
            if config.get("attention_bias"):
                shapes[f"{p}self_attn.{name}_proj.bias"] = (count * head_dim,)
        shapes[f"{p}self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if config.get("attention_bias"):
            shapes[f"{p}self_attn.o_proj.bias"] = (hidden,)
        shapes |= {f"{p}mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"{p}mlp.down_proj.weight"] = (hidden, ffn)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    random = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return {name: random.standard_normal(shape).astype(kind) for name, shape in sorted(shapes.items())}


def write_llama(
    folder: Path,
    *,
    hidden: int = 64,
    ffn: int = 128,
    heads: int = 8,
    kv: int = 4,
    layers: int = 2,
    vocab: int = 320,
    dtype: str = "float32",
    tied: bool = False,
    seed: int = 0,
    files: int = 1,
    **changes: Any,
) -> Path:
    """Write a checkpoint into `folder` (made if absent) and return it; `changes` go into config.json."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
    }
    config = llama_config(**sizes, tie_word_embeddings=tied, torch_dtype=dtype, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_weights(folder, llama_tensors(config, dtype, seed), files)
    return folder


def write_weights(folder: Path, tensors: dict[str, np.ndarray], files: int = 1) -> None:
    """Write tensors as model.safetensors or, with `files` > 1, spread over numbered files with an index."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    weight_map = {tensor: names[i * files // len(tensors)] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({t: v for t, v in tensors.items() if weight_map[t] == name}, folder / name, {"format": "pt"})
    write_json(folder / INDEX, {"metadata": {"total_size": 0}, "weight_map": weight_map})


def write_tokenizer(folder: Path, *, ordinary: int = 256, special: tuple[str, ...] = ("<s>", "</s>")) -> None:
    """Write tokenizer.json with `ordinary` one-character pieces, then the special tokens."""
    added = [{"id": ordinary + i, "content": token, "special": True} for i, token in enumerate(special)]
    vocab = {chr(0x100 + i): i for i in range(ordinary)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    write_json(folder / "tokenizer.json", {"version": "1.0", "added_tokens": added, "model": model})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes: Any) -> None:
    """Set top-level keys of a JSON file."""
    write_json(path, {**json.loads(path.read_text()), **changes})
