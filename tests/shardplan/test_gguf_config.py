"""config.json rebuilt from GGUF metadata, held against transformers' configs and the formulas of llama.cpp's converter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgtp.shardplan.errors import CheckpointError
from mgtp.shardplan.families import model_tensors, parse_config
from mgtp.shardplan.sources.gguf import GgufSource
from tests.helpers_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, open_tiny, tiny_tensors

ARCHS = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"biases": True}),
        ("llama", {"tensors": {"output.weight": np.zeros((275, HIDDEN), np.float32)}}),
        ("llama", {"metadata": {"llama.attention.sliding_window": 1024}}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3", {"metadata": {"gemma3.attention.sliding_window": 512}}),
    ],
)
def test_tensors_and_config_are_those_of_the_class_that_transformers_picks(
    tmp_path: Path, arch: str, changes: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = open_tiny(tmp_path, arch, **changes)
    (tmp_path / "config.json").write_bytes(source.files["config.json"])
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert {name: info.shape for name, info in source.tensors.items()} == expected
    assert [type(model).__name__] == source.config["architectures"]
    assert {spec.name: spec.shape for spec in model_tensors(parse_config(source.config))} == expected


@pytest.mark.parametrize("arch", ARCHS)
def test_config_has_what_transformers_reads_from_the_file(tmp_path: Path, arch: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = open_tiny(tmp_path, arch, metadata={f"{arch}.attention.sliding_window": 512} if arch == "gemma3" else {})
    theirs = load_gguf_checkpoint(str(source.path))["config"]
    assert theirs["model_type"] == source.config["model_type"]
    assert {"vocab_size", "head_dim", "rope_theta", "num_key_value_heads"} & set(theirs)
    for key in set(theirs) & set(source.config) - {"model_type", "rms_norm_eps"}:
        assert source.config[key] == theirs[key], key
    assert source.config["rms_norm_eps"] == 1e-5, "the shortest decimal of the float32 that is stored"
    assert source.config["vocab_size"] == source.tensors["model.embed_tokens.weight"].shape[0]


def test_token_ids_that_the_file_lacks_are_null_for_transformers_too(tmp_path: Path) -> None:
    from transformers import AutoConfig

    source = open_tiny(tmp_path, metadata={"tokenizer.ggml.bos_token_id": None})
    (tmp_path / "config.json").write_bytes(source.files["config.json"])
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 2, None)


def effective_rope(tmp_path: Path, source: GgufSource) -> dict[str, Any]:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_bytes(source.files["config.json"])
    return AutoConfig.from_pretrained(tmp_path).rope_parameters


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.factor": 0.0}, {"rope_type": "default"}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0,
             "rope.scaling.yarn_attn_factor": 1.25},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0,
             "attention_factor": 1.25},
        ),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    source = open_tiny(tmp_path, "qwen2", metadata={f"qwen2.{key}": value for key, value in metadata.items()})
    assert effective_rope(tmp_path, source) == expected | {"rope_theta": 500000.0}
    assert source.notes == []


def llama3_factors(head_dim: int, theta: float, factor: float, context: int = 8192) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's converter computes it."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < context / 4:
            factors.append(1.0)
        elif wavelength > context:
            factors.append(factor)
        else:
            smooth = (context / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_factors_become_llama3_scaling_with_the_same_frequencies(tmp_path: Path, factor: float) -> None:
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = llama3_factors(64, 500000.0, factor)
    assert len(set(factors.tolist())) > 3, "all three bands must be there"
    source = open_tiny(tmp_path, tensors={"rope_freqs.weight": factors})
    assert effective_rope(tmp_path, source)["rope_type"] == "llama3"
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path), torch.device("cpu"))
    stored = 500000.0 ** (-np.arange(0, 64, 2) / 64) / factors
    assert np.allclose(frequencies.numpy(), stored, rtol=1e-5, atol=0)
    assert "rope_freqs.weight" not in source.tensors


@pytest.mark.parametrize(
    ("factors", "metadata"),
    [
        (llama3_factors(64, 500000.0, 8.0, context=4096), {}),
        (llama3_factors(64, 10000.0, 8.0), {}),
        (llama3_factors(64, 500000.0, 8.0)[::-1].copy(), {}),
        (np.full(32, np.nan, np.float32), {}),
        (np.zeros(32, np.float32), {}),
        (np.ones(16, np.float32), {}),
        (llama3_factors(64, 500000.0, 8.0), {"llama.rope.scaling.factor": 2.0}),
    ],
)
def test_other_rope_factors_are_refused_by_name(tmp_path: Path, factors: np.ndarray, metadata: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_tiny(tmp_path, tensors={"rope_freqs.weight": factors}, metadata=metadata)


def test_rope_factors_of_one_scale_nothing(tmp_path: Path) -> None:
    source = open_tiny(tmp_path, tensors={"rope_freqs.weight": np.ones(32, np.float32)})
    assert "rope_scaling" not in source.config


def test_gemma3_layers_windows_and_rotations(tmp_path: Path) -> None:
    metadata = {"gemma3.attention.sliding_window": 512, "gemma3.attention.sliding_window_pattern": 2}
    metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0, "gemma3.rope.freq_base": 1e6}
    source = open_tiny(tmp_path, "gemma3", metadata=metadata)
    assert source.config["layer_types"] == ["sliding_attention", "full_attention"]
    assert source.config["sliding_window"] == 512
    assert source.config["query_pre_attn_scalar"] == HEAD_DIM["gemma3"]
    assert effective_rope(tmp_path, source) == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    per_layer = metadata | {"gemma3.attention.sliding_window_pattern": [False, True]}
    source = open_tiny(tmp_path, "gemma3", metadata=per_layer | {"gemma3.final_logit_softcapping": 30.0})
    assert source.config["layer_types"] == ["full_attention", "sliding_attention"]
    assert source.config["final_logit_softcapping"] == 30.0
    source = open_tiny(tmp_path, "gemma3")
    assert (source.config["layer_types"], source.config["sliding_window"]) == (["full_attention"] * LAYERS, None)


def test_gemma3_27b_scales_queries_by_hidden_over_heads(tmp_path: Path) -> None:
    layers = {name: array for name, array in tiny_tensors("gemma3", 8).items() if name.startswith("blk.1.")}
    more = {name.replace("blk.1.", f"blk.{i}."): array for i in range(2, 62) for name, array in layers.items()}
    small = {name: array[..., :32] if array.ndim > 1 else array for name, array in more.items()}
    source = open_tiny(tmp_path, "gemma3", metadata={"gemma3.block_count": 62}, tensors=small)
    assert source.config["query_pre_attn_scalar"] == HIDDEN // HEADS


def test_a_window_makes_a_llama_file_a_mistral(tmp_path: Path) -> None:
    source = open_tiny(tmp_path, metadata={"llama.attention.sliding_window": 4096})
    assert source.config["architectures"] == ["MistralForCausalLM"]
    assert source.config["sliding_window"] == 4096


def test_head_width_is_hidden_over_heads_where_it_is_not_stated(tmp_path: Path) -> None:
    source = open_tiny(tmp_path, metadata={"llama.attention.key_length": None, "llama.attention.value_length": None})
    assert source.config["head_dim"] == HIDDEN // HEADS


def test_the_same_count_for_every_layer_is_one_count(tmp_path: Path) -> None:
    source = open_tiny(tmp_path, metadata={"llama.attention.head_count_kv": [KV_HEADS] * LAYERS})
    assert source.config["num_key_value_heads"] == KV_HEADS


def test_settings_that_nothing_reads_are_noted(tmp_path: Path) -> None:
    metadata = {"llama.new_thing": 7, "llama.vocab_size": 275, "tokenizer.chat_template.tool_use": "x"}
    source = open_tiny(tmp_path, metadata=metadata)
    assert len(source.notes) == 2
    assert "'tokenizer.chat_template.tool_use'" in source.notes[0]
    assert source.notes[1] == "metadata 'llama.new_thing' is not used"
