"""Seeded random shapes of the recipes of Gemma 3 and 4, ERNIE 4.5, HunYuan, Phi-3, Granite and GLM-4.

build_random(recipe, seed) -> model in evaluation mode, with everything random
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.variants import FULL, SLIDING, build_shape


def build_random(recipe: str, seed: int) -> Any:
    """A model whose heads, sizes, patterns and options depend on `seed`, on the CPU in float32."""
    return build_shape(recipe, random_changes(recipe, Random(f"{recipe} {seed}")), seed)


def random_changes(recipe: str, r: Random) -> dict[str, Any]:
    """Settings in place of the recipe's own."""
    kv, group, half = r.randint(1, 4), r.randint(1, 4), r.randint(2, 16)
    changes: dict[str, Any] = {
        "num_attention_heads": kv * group,
        "num_key_value_heads": kv,
        "hidden_size": kv * group * 2 * r.randint(3, 8),  # some classes want a multiple of the heads
        "head_dim": 2 * half,
        "intermediate_size": r.randint(20, 150),
        "vocab_size": r.randint(100, 300),
        "num_hidden_layers": r.randint(1, 5),
        "tie_word_embeddings": r.random() < 0.5,
        "rms_norm_eps": 10 ** -r.uniform(3, 7),
    }
    return {**changes, **_SPECIAL[recipe](r, changes)}


def _gemma(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    count = changes["num_hidden_layers"]
    return {
        "layer_types": [r.choice((SLIDING, FULL)) for _ in range(count - 1)] + [FULL],
        "sliding_window": r.randint(2, 9),  # with 1 the reference's cache keeps too much
        "attention_bias": r.random() < 0.4,
        "final_logit_softcapping": r.choice((None, 5.0, 30.0)),
        "hidden_activation": r.choice(("gelu_pytorch_tanh", "gelu", "silu")),
    }


def _gemma3(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    return {**_gemma(r, changes), "query_pre_attn_scalar": r.randint(5, 100)}


def _gemma4(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    common = _gemma(r, changes)
    kinds, heads = common["layer_types"], changes["num_attention_heads"]
    shared = r.randint(0, len(kinds) - 1)
    while set(kinds[: len(kinds) - shared]) != set(kinds):
        shared -= 1
    width = r.choice((0, 5, 10))
    return {
        **common,
        "global_head_dim": 2 * r.randint(2, 16),
        "attention_k_eq_v": r.random() < 0.5,
        "num_global_key_value_heads": r.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": changes["vocab_size"] + r.choice((0, 13)),
        "num_kv_shared_layers": shared if width else 0,  # the reference cannot share without such embeddings
        "use_double_wide_mlp": r.random() < 0.5,
    }


def _ernie4_5(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": r.random() < 0.5}


def _hunyuan(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": r.random() < 0.5}


def _phi3(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    pairs = changes["hidden_size"] // changes["num_attention_heads"] // 2
    ropes = {
        "default": {},
        "longrope": {
            "short_factor": [r.uniform(1, 2) for _ in range(pairs)],
            "long_factor": [r.uniform(2, 6) for _ in range(pairs)],
        },
    }
    kind = r.choice(list(ropes))
    rope = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 1.0, **ropes[kind]}
    return {"head_dim": 2 * pairs, "rope_parameters": rope, "sliding_window": r.choice((None, 2, 5, 9))}


def _granite(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": r.random() < 0.5,
        "mlp_bias": r.random() < 0.5,
        "embedding_multiplier": r.uniform(0.5, 12),
        "attention_multiplier": r.uniform(0.01, 1),
        "residual_multiplier": r.uniform(0.1, 1),
        "logits_scaling": r.uniform(0.3, 8),
    }


def _glm4(r: Random, changes: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": r.choice((0.5, 1.0))}
    return {"head_dim": 4 * r.randint(1, 8), "attention_bias": r.random() < 0.5, "rope_parameters": rope}


_SPECIAL = {
    "gemma3": _gemma3,
    "gemma4_e": _gemma4,
    "gemma4_keqv": _gemma4,
    "ernie4_5": _ernie4_5,
    "hunyuan": _hunyuan,
    "phi3": _phi3,
    "granite": _granite,
    "glm4": _glm4,
}

RECIPES = tuple(_SPECIAL)
