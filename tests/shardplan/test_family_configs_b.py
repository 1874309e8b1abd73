"""config.json in every spelling that is seen on disk, and what is refused: Qwen3.5, OLMo, and mixtures of experts.

The oracle for spellings is transformers: what it makes of an old file and writes again must mean the same to mgtp.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import transformers as T

from mgtp.shardplan.config import Attention
from mgtp.shardplan.errors import CheckpointError, UsageError
from mgtp.shardplan.families import model_tensors, parse_config
from mgtp.shardplan.layout import ALIGNMENT, lay_out
from mgtp.shardplan.partition import model_axes, source_ranges
from mgtp.shardplan.sources.base import TensorInfo
from tests.recipes import RECIPES

NAMES = ("qwen3_5", "qwen3_5_vl", "olmo2", "olmo3", "qwen3_moe", "mixtral", "gpt_oss")
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


def recipe_config(name: str) -> dict[str, Any]:
    """config.json as transformers saves it for a model of tests/recipes.py."""
    cls, config = RECIPES[name]()
    return {**json.loads(config.to_json_string()), "architectures": [cls.__name__]}


def text_level(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def attention_of(config: dict[str, Any], layer: int) -> Attention:
    found = parse_config(config).layers[layer].attention
    assert found is not None
    return found


OLD_FILES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "olmo2, theta at the top": ("olmo2", T.Olmo2Config, {"rope_theta": 5e5}),
    "olmo2, scaled": ("olmo2", T.Olmo2Config, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "olmo3, nothing said": ("olmo3", T.Olmo3Config, {}),
    "olmo3, theta at the top": ("olmo3", T.Olmo3Config, {"rope_theta": 1234.0}),
    "olmo3, scaled": ("olmo3", T.Olmo3Config, {"rope_theta": 1234.0, "rope_scaling": {**YARN, "truncate": False}}),
    "qwen3_5, nothing said": ("qwen3_5", T.Qwen3_5TextConfig, {"head_dim": 32}),
    "qwen3_5, part at the top": ("qwen3_5", T.Qwen3_5TextConfig, {"partial_rotary_factor": 0.5, "rope_theta": 1e7}),
    "qwen3_5, scaled": ("qwen3_5", T.Qwen3_5TextConfig, {"head_dim": 32, "rope_theta": 1e7, "rope_scaling": YARN}),
    "mixtral, nothing said": ("mixtral", T.MixtralConfig, {}),
    "mixtral, by the other name": ("mixtral", T.MixtralConfig, {"num_local_experts": None, "num_experts": 3}),
    "qwen3_moe, by the other name": ("qwen3_moe", T.Qwen3MoeConfig, {"num_local_experts": None, "num_experts": 3}),
    "qwen3_moe, theta at the top": ("qwen3_moe", T.Qwen3MoeConfig, {"rope_theta": 1e6}),
    "gpt_oss, nothing said": ("gpt_oss", T.GptOssConfig, {}),
    "gpt_oss, scaled": ("gpt_oss", T.GptOssConfig, {"rope_theta": 1.5e5, "rope_scaling": {**YARN, "truncate": False}}),
}


@pytest.mark.parametrize("case", OLD_FILES)
def test_older_files_equal_what_transformers_makes_of_them(case):
    name, config_class, changes = OLD_FILES[case]
    config = recipe_config(name)
    del config["rope_parameters"]
    old = {k: v for k, v in {**config, **changes}.items() if v is not None}
    given = json.loads(json.dumps(old))  # transformers changes what it is given
    new = {**json.loads(config_class(**given).to_json_string()), "architectures": config["architectures"]}
    assert parse_config(old) == parse_config(new)


def test_olmo3_scales_the_layers_with_full_attention_only():
    config = recipe_config("olmo3")
    config |= {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 1e6}
    sliding, full = attention_of(config, 0), attention_of(config, 3)
    assert (sliding.rope.kind, sliding.rope.theta, sliding.window) == ("default", 5e5, 4)
    assert (full.rope.kind, full.rope.theta, full.window) == ("yarn", 1e6, None)


def test_qwen3_5_takes_what_is_left_out_from_the_class():
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"hidden_size": 2048}}
    model = parse_config(config)
    attention, net = model.layers[3].attention, model.layers[2].delta_net
    assert attention is not None
    assert net is not None
    assert len(model.layers) == 32
    assert (model.vocab_size, attention.num_heads, attention.num_kv_heads, attention.head_dim) == (248320, 16, 4, 256)
    assert (net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim) == (16, 32, 128, 128)
    assert attention.rope.rotary_dim == 64


@pytest.mark.parametrize("tied", [(True, None), (None, True), (True, False), (False, True)])
def test_either_level_of_a_wrapper_may_tie_the_embeddings(tied):
    config = recipe_config("qwen3_5_vl")
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = tied
    assert parse_config(config).tie_word_embeddings


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gates off": ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
    "uneven groups of values": ("qwen3_5", {"linear_num_key_heads": 4}, "linear_num_value_heads 6"),
    "an unknown layer": ("qwen3_5", {"layer_types": ["mamba"] * 4}, "layer_types"),
    "an unknown rope": ("qwen3_5", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, "'mrope'"),
    "packed weights": ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'"),
    "more experts a token than there are": ("mixtral", {"num_experts_per_tok": 6}, "more than the 5 experts"),
    "layers that are no numbers": ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
    "uneven groups of queries": ("olmo2", {"num_key_value_heads": 4}, "num_attention_heads 6"),
    "a window of nothing": ("olmo3", {"sliding_window": 0}, "sliding_window is 0"),
    "an unknown activation": ("mixtral", {"hidden_act": "xielu"}, "hidden_act"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case):
    name, changes, words = REFUSED[case]
    config = recipe_config(name)
    text_level(config).update(changes)
    with pytest.raises(CheckpointError, match=words):
        parse_config(config)


def test_packed_weights_without_a_note_are_refused_by_their_names(tmp_path):
    """A checkpoint in mxfp4 whose config.json has lost its quantization_config: the tensors themselves tell."""
    import torch
    from safetensors.torch import save_file

    from mgtp.shardplan.planner import match
    from mgtp.shardplan.sources import open_source

    config = recipe_config("gpt_oss")
    tensors = {s.name: torch.zeros(s.shape) for s in model_tensors(parse_config(config))}
    for name in [n for n in tensors if n.endswith("experts.gate_up_proj")]:
        del tensors[name]
        tensors |= {f"{name}_{part}": torch.zeros(5, 42, 4, dtype=torch.uint8) for part in ("blocks", "scales")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        match(open_source(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "tp_size", "words"),
    [
        ("qwen3_5", 7, "6 delta v heads"),
        ("qwen3_moe", 7, "6 q heads"),
        ("mixtral", 7, "6 q heads"),
        ("olmo2", 7, "6 q heads"),
    ],
)
def test_more_ranks_than_heads_are_refused_with_both_numbers(name, tp_size, words):
    with pytest.raises(UsageError, match=f"--tp-size {tp_size} is more than the model's {words}"):
        model_axes(parse_config(recipe_config(name)), [1] * tp_size)


@pytest.mark.parametrize("rank", range(3))
def test_packed_heads_are_cut_in_each_of_their_parts(rank):
    """One key head and two value heads a rank, from [3 q x 12 | 3 k x 12 | 6 v x 20]."""
    model = parse_config(recipe_config("qwen3_5"))
    axes, specs = model_axes(model, [1] * 3), {spec.name: spec for spec in model_tensors(model)}
    for name in ("in_proj_qkv", "conv1d"):
        cut = specs[f"model.layers.0.linear_attn.{name}.weight"].cut
        assert cut is not None
        starts = (12 * rank, 36 + 12 * rank, 72 + 40 * rank)
        assert source_ranges(cut, axes, rank) == list(
            zip(starts, (starts[0] + 12, starts[1] + 12, starts[2] + 40), strict=False)
        )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_lie_back_to_back(name):
    """So that a rank can view all of a layer's as one stack: nothing is copied when a model is loaded."""
    model = parse_config(recipe_config(name))
    specs = list(model_tensors(model))
    sources = {s.name: TensorInfo(s.name, "BF16", s.shape) for s in specs}
    plan = lay_out(specs, sources, model_axes(model, [1, 1]), 1, 2, "BF16")
    places = {t.name: t for t in plan.tensors}
    experts = [places[s.name] for s in specs if ".layers.1." in s.name and ".experts." in s.name]
    gate_up, down = experts[:10], experts[10:]
    for group in (gate_up, down):
        assert group[0].offset % ALIGNMENT == 0
        assert all(a.offset + a.bytes == b.offset for a, b in itertools.pairwise(group))


VALUES = [True, 0, -1, 3, 2**60, 10**400, 0.5, float("nan"), "x", "9" * 5000, [], [1], {}, {"1": 1}]


@pytest.mark.parametrize("name", NAMES)
def test_any_value_of_any_key_is_refused_or_understood(name):
    """Nothing but a CheckpointError may come of a file that is wrong."""
    for key in [*text_level(recipe_config(name)), "rope_scaling", "full_attention_interval", "num_experts"]:
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
