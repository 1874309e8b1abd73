"""config.json in every spelling that is seen on disk, and what is refused: Gemma 3 and 4 and the families beside them.

The oracle for spellings is transformers: what it makes of an old file and writes again must mean the same to mgtp.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import transformers as T

from mgtp.runtime.cache_layout import cache_groups
from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.families import is_unused, model_tensors, parse_config
from mgtp.shardplan.partition import model_axes
from tests.recipes import RECIPES
from tests.tiny import llama_config

SLIDING, FULL = "sliding_attention", "full_attention"


def recipe_config(name: str) -> dict[str, Any]:
    """config.json as transformers saves it for a model of tests/recipes.py."""
    cls, config = RECIPES[name]()
    return {**json.loads(config.to_json_string()), "architectures": [cls.__name__]}


def text_level(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def rewritten(config_class: Any, config: dict[str, Any]) -> dict[str, Any]:
    """`config`, read and written again by transformers."""
    return {**json.loads(config_class(**config).to_json_string()), "architectures": config["architectures"]}


GEMMA3_OF_2025 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
"""What the hub has for the 4B model: heads, vocabulary and much else are left to the class."""

GEMMA4_ON_THE_HUB = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
}


def test_gemma3_takes_what_is_left_out_from_the_class():
    model = parse_config(GEMMA3_OF_2025)
    sliding, full = model.layers[0].attention, model.layers[5].attention
    assert sliding is not None
    assert full is not None
    assert (model.vocab_size, sliding.num_heads, sliding.num_kv_heads, sliding.head_dim) == (262208, 8, 4, 256)
    assert (sliding.window, full.window, sliding.scaling) == (1024, None, 1 / 16)
    assert (sliding.rope.theta, sliding.rope.kind) == (1e4, "default")
    assert (full.rope.theta, full.rope.kind, full.rope.factor) == (1e6, "linear", 8.0)
    assert (model.tie_word_embeddings, model.activation) == (True, "gelu_pytorch_tanh")
    assert model.scales.embedding == math.sqrt(2560)


@pytest.mark.parametrize(
    "changes", [{}, {"rope_theta": 5e5, "rope_local_base_freq": 777.0, "sliding_window_pattern": 2}]
)
def test_gemma3_of_older_files_equals_what_transformers_makes_of_it(changes):
    old = {**GEMMA3_OF_2025["text_config"], **changes, "architectures": ["Gemma3ForCausalLM"]}
    assert parse_config(old) == parse_config(rewritten(T.Gemma3TextConfig, old))


@pytest.mark.parametrize(
    "changes", [{}, {"attention_k_eq_v": False}, {"global_head_dim": 16, "attention_k_eq_v": False}]
)
def test_gemma4_has_two_spellings(changes):
    """`global_head_dim` and its like on the hub; per_layer_config, with padded keys, in what transformers writes."""
    hub = {**GEMMA4_ON_THE_HUB, **changes}
    saved = rewritten(T.Gemma4TextConfig, hub)
    assert "per_layer_config" in saved
    assert "global_head_dim" not in saved
    assert parse_config(hub) == parse_config(saved)


def test_gemma4_shares_keys_within_a_layer_type():
    model = parse_config(GEMMA4_ON_THE_HUB)
    sources = [layer.attention.kv_source for layer in model.layers if layer.attention is not None]
    assert sources == [None] * 6 + [4, 4, 4, 4, 4, 5]
    assert [layer.ffn.size for layer in model.layers] == [40] * 6 + [80] * 6


def test_gemma4_layer_types_share_out_heads_on_axes_of_their_own():
    axes = model_axes(parse_config(GEMMA4_ON_THE_HUB), [1, 1, 1])
    assert axes["kv_heads"].ranges == ((0, 1), (1, 3), (3, 4))
    assert axes["q_heads"].ranges == ((0, 2), (2, 6), (6, 8))
    assert axes["global_kv_heads"].ranges == ((0, 1),) * 3
    assert axes["global_q_heads"].ranges == ((0, 3), (3, 5), (5, 8))
    assert {"ffn", "wide_ffn", "vocab"} <= set(axes)


def test_layers_that_share_keys_cache_nothing():
    full, sliding = cache_groups(parse_config(GEMMA4_ON_THE_HUB))
    assert (full.window, full.layers) == (None, (5,))
    assert (sliding.window, sliding.layers) == (512, (0, 1, 2, 3, 4))


def test_leftover_keys_of_sharing_layers_are_skipped():
    """Released files still hold them; those of other layers, and the queries, are needed."""
    model = parse_config(GEMMA4_ON_THE_HUB)
    names = {spec.name for spec in model_tensors(model)}
    for part in ("k_proj", "v_proj", "k_norm"):
        name = f"model.layers.7.self_attn.{part}.weight"
        assert name not in names
        assert is_unused(model, name)
        assert not is_unused(model, f"model.layers.2.self_attn.{part}.weight")
    assert not is_unused(model, "model.layers.7.self_attn.q_proj.weight")


def test_the_logits_cap_belongs_to_gemma3s_text_class_only():
    assert parse_config(recipe_config("gemma3")).scales.logit_softcap == 5.0
    assert parse_config(recipe_config("gemma3_vl")).scales.logit_softcap is None
    assert parse_config(recipe_config("gemma4_e")).scales.logit_softcap == 5.0
    assert parse_config(recipe_config("gemma4_vl")).scales.logit_softcap == 5.0


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_knows_longrope_by_three_names(kind):
    config = recipe_config("phi3")
    config["rope_parameters"]["rope_type"] = kind
    assert parse_config(config) == parse_config(recipe_config("phi3"))


def test_hunyuan_takes_the_head_dimension_by_its_old_name():
    config = recipe_config("hunyuan")
    renamed = {**config, "head_dim": None, "attention_head_dim": config["head_dim"]}
    assert parse_config(renamed) == parse_config(config)


REFUSED = {
    "use_bidirectional_attention": ("gemma3", True),
    "use_bidirectional_attention, all": ("gemma4_e", "all"),
    "enable_moe_block": ("gemma4_e", True),
    "num_kv_shared_layers": ("gemma4_e", 5),
    "vocab_size_per_layer_input": ("gemma4_e", 100),
    "per_layer_config": ("gemma4_e", {"1": {"intermediate_size": 5}}),
    "per_layer_config, a layer of its own": ("gemma4_e", {"1": {"head_dim": 8}}),
    "per_layer_config, beyond the layers": ("gemma4_e", {"6": {"head_dim": 8}}),
    "per_layer_config, of another family": ("granite", {"1": {"num_key_value_heads": 1}}),
    "hidden_activation": ("gemma3", "mish"),
    "hidden_act": ("granite", "swiglu"),
    "use_cla": ("hunyuan", True),
    "use_qk_norm": ("hunyuan", False),
    "rope": ("phi3", None),
    "rope_parameters": ("gemma4_e", {"rope_type": "default", "rope_theta": 1e4}),
    "logits_scaling": ("granite", 0),
    "query_pre_attn_scalar": ("gemma3", -1),
    "layer_types": ("gemma3", [SLIDING, "chunked_attention", FULL, FULL]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case):
    name, value = REFUSED[case]
    key, config = case.split(",")[0], recipe_config(name)
    if key == "rope":
        config["rope_parameters"] = {"rope_type": "llama3", "factor": 2.0}
    else:
        text_level(config)[key] = value
    with pytest.raises(CheckpointError) as caught:
        parse_config(config)
    assert key in caught.value.message


def test_vision_attention_changes_nothing_for_text():
    config = recipe_config("gemma4_e")
    assert parse_config({**config, "use_bidirectional_attention": "vision"}) == parse_config(config)


VALUES = [True, 0, -1, 3, 2**60, 10**400, 0.5, float("nan"), "x", "9" * 5000, [], [1], {}, {"1": 1}, {"9" * 5000: {}}]


@pytest.mark.parametrize(
    "name", ["gemma3_vl", "gemma4_vl", "gemma4_keqv", "ernie4_5", "hunyuan", "phi3", "granite", "glm4"]
)
def test_any_value_of_any_key_is_refused_or_understood(name):
    """Nothing but a CheckpointError may come of a file that is wrong."""
    for key in [*text_level(recipe_config(name)), "per_layer_config", "rope_scaling", "attention_head_dim"]:
        for value in VALUES:
            config = recipe_config(name)
            text_level(config)[key] = value
            message = refusal(config)
            assert message is None or "\n" not in message


def refusal(config: dict[str, Any]) -> str | None:
    """Why a model is refused, if it is."""
    try:
        list(model_tensors(parse_config(config)))
    except CheckpointError as error:
        return error.message
    return None


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("hidden_size", 10**30, (1 << 40) - 1), ("head_dim", 1 << 40, (1 << 40) - 1),
        ("max_position_embeddings", 10**20, (1 << 40) - 1), ("num_hidden_layers", 10**12, 10_000),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_with_the_limit(key, value, most):
    assert f"{key} is {value}, must be a positive integer, at most {most}" in (
        refusal(llama_config(**{key: value})) or ""
    )
