"""Models of tests/recipes.py in other shapes: other head groups, windows, patterns, sizes and options.

build_variant(label, seed) -> model in evaluation mode, with everything random
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

from tests.recipes import COMMON, RECIPES, randomize_

SLIDING, FULL = "sliding_attention", "full_attention"


def gemma4_unified() -> tuple[Any, Any]:
    """The text class of the model that has no vision and audio towers of its own."""
    return T.Gemma4UnifiedForCausalLM, T.Gemma4UnifiedTextConfig(**COMMON, **_UNIFIED)


def gemma4_unified_vl() -> tuple[Any, Any]:
    """The same decoder within its multimodal class."""
    text = {"model_type": "gemma4_unified_text", **COMMON, "pad_token_id": 0, **_UNIFIED}
    return T.Gemma4UnifiedForConditionalGeneration, T.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=None,
        audio_config=None,
        image_token_id=5,
        video_token_id=6,
        audio_token_id=7,
        boi_token_id=8,
        eoi_token_id=9,
        boa_token_id=10,
        eoa_token_index=11,
    )


_UNIFIED = {
    "hidden_size": 52,
    "intermediate_size": 77,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "max_position_embeddings": 256,
    "final_logit_softcapping": 5.0,
    "attention_k_eq_v": True,
}

_RECIPES = {**RECIPES, "gemma4_unified": gemma4_unified, "gemma4_unified_vl": gemma4_unified_vl}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 unified": ("gemma4_unified", {}),
    "gemma4 unified, wrapped": ("gemma4_unified_vl", {}),
    "gemma3 by pattern": (
        "gemma3",
        {
            "hidden_size": 48,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "vocab_size": 97,
            "num_hidden_layers": 7,
            "layer_types": None,
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3, one kv head, window 2": (
        "gemma3",
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 2},
    ),
    "gemma3, every layer full": (
        "gemma3",
        {"num_hidden_layers": 2, "layer_types": [FULL] * 2, "hidden_activation": "gelu", "rms_norm_eps": 1e-4},
    ),
    "gemma4, k equals v, one global kv head": (
        "gemma4_keqv",
        {
            "hidden_size": 48,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "head_dim": 12,
            "global_head_dim": 32,
            "intermediate_size": 40,
            "vocab_size": 97,
            "num_hidden_layers": 7,
            "layer_types": None,
            "sliding_window": 5,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4, most layers share keys": (
        "gemma4_e",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 12,
            "intermediate_size": 40,
            "vocab_size": 97,
            "vocab_size_per_layer_input": 113,
            "hidden_size_per_layer_input": 6,
            "num_hidden_layers": 8,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL, FULL],
            "num_kv_shared_layers": 5,
            "sliding_window": 3,
        },
    ),
    "gemma4, per-layer embeddings alone": (
        "gemma4_e",
        {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "global_head_dim": 16, "rope_parameters": None},
    ),
    "ernie without biases": (
        "ernie4_5",
        {
            "hidden_size": 48,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "vocab_size": 97,
            "num_hidden_layers": 4,
            "use_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan without alpha": (
        "hunyuan",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": 97,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "phi3 with a window": (
        "phi3",
        {
            "hidden_size": 96,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 40,
            "vocab_size": 97,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "granite with biases": (
        "granite",
        {
            "hidden_size": 48,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 12,
            "intermediate_size": 40,
            "vocab_size": 97,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "embedding_multiplier": 3.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.3,
        },
    ),
    "glm4 without biases": (
        "glm4",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "intermediate_size": 40,
            "vocab_size": 97,
            "num_hidden_layers": 3,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
}

_DERIVED = ("per_layer_config", "architectures", "transformers_version", "dtype")


def build_variant(label: str, seed: int = 0) -> Any:
    """The model that `label` names, on the CPU in float32."""
    recipe, changes = VARIANTS[label]
    return build_shape(recipe, changes, seed)


def build_shape(recipe: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """The model of a recipe with some of its settings changed."""
    cls, config = _RECIPES[recipe]()
    if changes:
        settings = {k: v for k, v in config.to_dict().items() if k not in _DERIVED}
        config = type(config)(**{**settings, **changes})
    torch.manual_seed(seed)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize_(model, seed)
    return model
