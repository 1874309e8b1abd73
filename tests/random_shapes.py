"""Seeded random configurations of the families that have states, norms over all heads, or experts.

    build_random(family, seed) -> model in evaluation mode, everything random

Left out is what transformers itself gets wrong: its cache cannot hold a model of delta nets alone, and with a window of
1 it drops nothing, so that its cached logits are others than its full ones.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import transformers as T

from tests.recipes import randomize_
from tests.releases import at_least

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def build_random(family: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A model of `family` whose heads, sizes, patterns and options depend on `seed`."""
    cls, config = CONFIGS[family](Random(f"{family} {seed}"))
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize_(model, seed)
    return model.to(dtype)


def largest_tp_size(config: Any) -> int:
    """The number of ranks that the heads allow."""
    values = getattr(config, "linear_num_value_heads", None)
    return config.num_attention_heads if values is None else min(config.num_attention_heads, values)


def _base(r: Random) -> dict[str, Any]:
    kv, group = r.randint(1, 4), r.randint(1, 4)
    return {
        "vocab_size": r.choice((61, 97, 131)),
        "hidden_size": r.randint(10, 40) * 2,
        "intermediate_size": r.randint(16, 70),
        "num_hidden_layers": r.randint(1, 4),
        "num_attention_heads": kv * group,
        "num_key_value_heads": kv,
        "head_dim": r.choice((8, 12, 16, 20, 32)),
        "max_position_embeddings": 256,
        "tie_word_embeddings": r.random() < 0.5,
        "rms_norm_eps": r.choice((1e-6, 1e-5, 1e-3)),
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def _rope(r: Random, theta: float = 10000.0) -> dict[str, Any]:
    kind = r.choice(("default", "linear", "yarn", "llama3"))
    extra = {
        "default": {},
        "linear": {"factor": r.choice((2.0, 5.5))},
        "yarn": {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }[kind]
    return {"rope_type": kind, "rope_theta": theta * r.choice((1, 7)), **extra}


def _pattern(r: Random, count: int, kinds: tuple[str, str]) -> list[str]:
    """Layer types, at least one of them the second kind."""
    pattern = [r.choice(kinds) for _ in range(count)]
    pattern[r.randrange(count)] = kinds[1]
    return pattern


def _qwen3_5(r: Random) -> tuple[type, Any]:
    base = _base(r)
    keys = r.randint(1, 4)
    base |= {
        "head_dim": r.choice((8, 16, 24, 32)),
        "layer_types": _pattern(r, base["num_hidden_layers"], (LINEAR, FULL)),
        "attention_bias": r.random() < 0.5,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * r.randint(1, 4),
        "linear_key_head_dim": r.choice((4, 12, 16, 24)),
        "linear_value_head_dim": r.choice((4, 12, 20, 32)),
        "linear_conv_kernel_dim": r.randint(2, 5),
        "rope_parameters": {**_rope(r), "partial_rotary_factor": r.choice((0.25, 0.5, 1.0))},
    }
    return T.Qwen3_5ForCausalLM, T.Qwen3_5TextConfig(**base)


def _olmo2(r: Random) -> tuple[type, Any]:
    options = {"attention_bias": r.random() < 0.5, "rope_parameters": _rope(r)}
    return T.Olmo2ForCausalLM, T.Olmo2Config(**_base(r), **options)


def _olmo3(r: Random) -> tuple[type, Any]:
    base = _base(r)
    base |= {
        "layer_types": _pattern(r, base["num_hidden_layers"], (SLIDING, FULL)),
        "sliding_window": r.randint(2, 12),
        "attention_bias": r.random() < 0.5,
        "rope_parameters": {SLIDING: _rope(r), FULL: _rope(r)},
    }
    return T.Olmo3ForCausalLM, T.Olmo3Config(**base)


def _experts(r: Random) -> dict[str, Any]:
    count = r.randint(1, 9)
    return {"num_local_experts": count, "num_experts_per_tok": r.randint(1, min(count, 4))}


def _qwen3_moe(r: Random) -> tuple[type, Any]:
    base = _base(r)
    base |= {
        **_experts(r),
        "moe_intermediate_size": r.randint(16, 40),
        "norm_topk_prob": r.random() < 0.5,
        "mlp_only_layers": [i for i in range(base["num_hidden_layers"]) if r.random() < 0.2],
        "decoder_sparse_step": r.randint(1, 2),
        "attention_bias": r.random() < 0.5,
        "use_sliding_window": r.random() < 0.5,
        "sliding_window": r.randint(2, 12),
        "rope_parameters": _rope(r),
    }
    return T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig(**base)


def _mixtral(r: Random) -> tuple[type, Any]:
    window = r.choice((None, r.randint(2, 12)))
    return T.MixtralForCausalLM, T.MixtralConfig(
        **_base(r), **_experts(r), sliding_window=window, rope_parameters=_rope(r, 1e6)
    )


def _clamped_swiglu(r: Random) -> dict[str, Any]:
    """Nothing for transformers before 5.19, which takes 7 and 1.702 whatever the config says."""
    limit = r.choice((0.5, 2.0, 7.0))  # a low one is reached by many
    drawn = {"swiglu_limit": limit, "swiglu_alpha": r.choice((0.9, 1.702))}
    return drawn if at_least("transformers", "5.19") else {}


def _gpt_oss(r: Random) -> tuple[type, Any]:
    base = _base(r)
    base |= {
        **_experts(r),
        "layer_types": _pattern(r, base["num_hidden_layers"], (SLIDING, FULL)),
        "sliding_window": r.randint(2, 12),
        "attention_bias": r.random() < 0.5,
        **_clamped_swiglu(r),
        "rope_parameters": _rope(r, 150000.0),
    }
    if base["rope_parameters"]["rope_type"] == "yarn":
        base["rope_parameters"]["truncate"] = r.random() < 0.5
    return T.GptOssForCausalLM, T.GptOssConfig(**base)


CONFIGS = {
    "qwen3_5": _qwen3_5,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
}
