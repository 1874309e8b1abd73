"""Tiny checkpoints with greedy references of transformers, one for each kind of fault that users of such tools report.

Each is a normal Hugging Face folder; its ref.json holds prompt ids, the 24 greedy ids of transformers in float32, and the
smallest top-1/top-2 margin, so that a mismatch is a fault and not a tie. Cases whose name starts with bad_ have no
reference: the right answer is an error.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user','assistant'] %}"
    "{{ raise_exception('only user/assistant') }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

BASE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=320, max_position_embeddings=256, initializer_range=0.25, bos_token_id=256, eos_token_id=257,
    tie_word_embeddings=False,
)  # fmt: skip

R = dict(rope_theta=10000.0)
CASES = {
    "base": dict(),
    "heads28_kv4": dict(num_attention_heads=28, hidden_size=224),  # Qwen2-7B's head counts
    "heads12_kv2": dict(num_attention_heads=12, num_key_value_heads=2, hidden_size=96),  # Qwen2-1.5B's head counts
    "mqa_kv1": dict(num_key_value_heads=1),
    "vocab331": dict(vocab_size=331),
    "tied": dict(tie_word_embeddings=True),
    "tied_vocab331": dict(tie_word_embeddings=True, vocab_size=331),
    "headdim": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32),  # 4*32 != 64
    "allbias": dict(attention_bias=True, mlp_bias=True),
    "qwen2_qkvbias": dict(cls=Qwen2ForCausalLM, cfg=Qwen2Config),
    "rope_llama3": dict(
        prompt_len=120,
        rope_parameters=dict(
            R, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "rope_dynamic_short": dict(
        prompt_len=20, max_position_embeddings=64, rope_parameters=dict(R, rope_type="dynamic", factor=4.0)
    ),
    "sliding8": dict(cls=MistralForCausalLM, cfg=MistralConfig, prompt_len=60, sliding_window=8),
    "multishard": dict(shard="60KB"),
    "long32k": dict(max_position_embeddings=32768),
}  # fmt: skip


INDEX = "model.safetensors.index.json"


def make(out: Path | str, name: str) -> Path:
    """Write case `name` (and the case it is derived from) under `out`."""
    path = Path(out) / name
    if name in CASES:
        build(path, **CASES[name])
        return path
    source, change = DERIVED[name]
    if not (Path(out) / source).exists():
        make(out, source)
    shutil.copytree(Path(out) / source, path)
    if name.startswith("bad_"):
        (path / "ref.json").unlink()
    change(path)
    return path


def build(path: Path, cls=LlamaForCausalLM, cfg=LlamaConfig, prompt_len=40, shard=None, **kw: Any) -> None:
    """A model with random norms and biases: at their constant defaults, faults in them would not show."""
    path.mkdir(parents=True)
    torch.manual_seed(0)
    model = cls(cfg(**{**BASE, **kw})).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.5)
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    write_tokenizer(path)
    write_reference(path, prompt_len)


def write_tokenizer(path: Path) -> None:
    """Bytes alone, without merges: every character that is not ASCII is several tokens."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in ("<s>", "</s>", "<|user|>", "<|assistant|>")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(path)


@torch.no_grad()
def write_reference(path: Path, prompt_len: int) -> None:
    """ref.json, computed without a cache: the plainest oracle."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = [256] + [(7 * i * i + 3 * i) % 250 for i in range(prompt_len - 1)]
    margin, ids = 1e9, []
    for _ in range(24):
        logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        margin = min(margin, first - second)
        ids.append(int(logits.argmax()))
    write_json(path / "ref.json", {"prompt_ids": prompt, "greedy_ids": ids, "min_margin": margin})


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order."""
    return sorted(path.glob("*.safetensors"))


def old_rope_keys(path: Path) -> None:
    """The spelling of transformers 4."""
    config = read_json(path / "config.json")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    write_json(path / "config.json", config)


def overlay(path: Path) -> None:
    """The index sends one name to a new file, the old copy (all 9.0) stays in the old file."""
    index, name = read_json(path / INDEX), "model.layers.0.mlp.down_proj.weight"
    old_file = path / index["weight_map"][name]
    old = load_file(old_file)
    good = old[name].clone()
    old[name] = torch.full_like(good, 9.0)
    save_file(old, old_file, metadata={"format": "pt"})
    save_file({name: good}, path / "model-overlay.safetensors", metadata={"format": "pt"})
    index["weight_map"][name] = "model-overlay.safetensors"
    write_json(path / INDEX, index)


def missing_shard(path: Path) -> None:
    weight_files(path)[1].unlink()


def truncated(path: Path) -> None:
    file = weight_files(path)[0]
    os.truncate(file, file.stat().st_size - 1000)


def lfs_pointer(path: Path) -> None:
    weight_files(path)[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def absent_tensor(path: Path) -> None:
    index = read_json(path / INDEX)
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = min(index["weight_map"].values())
    write_json(path / INDEX, index)


def without(tensor: str) -> Callable[[Path], None]:
    """A change that takes a tensor out."""

    def change(path: Path) -> None:
        file = weight_files(path)[0]
        weights = load_file(file)
        del weights[tensor]
        save_file(weights, file, metadata={"format": "pt"})

    return change


DERIVED = {
    "rope_llama3_oldkeys": ("rope_llama3", old_rope_keys),
    "overlay_index": ("multishard", overlay),
    "bad_missing_shard": ("multishard", missing_shard),
    "bad_truncated": ("base", truncated),
    "bad_lfs_pointer": ("base", lfs_pointer),
    "bad_index_names_absent_tensor": ("multishard", absent_tensor),
    "bad_missing_tensor": ("base", without("model.layers.1.self_attn.k_proj.weight")),
    "bad_untied_no_head": ("base", without("lm_head.weight")),
}
