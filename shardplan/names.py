"""Tensor names: from what checkpoints call their tensors to the names the families use (`model.X`, `lm_head.weight`)."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Text-model prefixes seen on disk, most specific first: multimodal wrappers, text classes, bare base models.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.", "model."),
    ("lm_head.", "lm_head."),
)

_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$"
    r"|^(model\.)?mtp\."
    r"|(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|vision_embedder|embed_vision"
    r"|audio_tower|embed_audio|image_newline)(\.|$)"
)


def is_ignored(name: str) -> bool:
    """Whether a tensor is known to play no part in text generation (rope buffers, MTP heads, vision and audio towers)."""
    return _IGNORED.search(name) is not None


def canonical_name(name: str) -> str:
    """`name` with the prefix of its checkpoint replaced by the text class's; bare names get `model.`."""
    for prefix, canonical in _PREFIXES:
        if name.startswith(prefix):
            return canonical + name[len(prefix) :]
    return "model." + name


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Whether experts lie on disk as transformers 5 holds them, all of a layer's in one tensor, not one by one."""
    return any(name.endswith(".mlp.experts.gate_up_proj") for name in names)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name on disk, for every tensor that is not ignored.

    Two spellings of one tensor in one checkpoint cannot be told apart: the later one is kept under its own name, so
    that the planner reports it as unexpected.
    """
    found: dict[str, str] = {}
    for name in names:
        if not is_ignored(name):
            key = canonical_name(name)
            found[name if key in found else key] = name
    return found
