"""Seeded damage to every file that is parsed: a clean refusal or the right answer, never another exception, never slow.

Values in config.json cannot be told from intended ones, so there only the absence of other exceptions is checked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgtp.shardplan.errors import MgtpError
from mgtp.shardplan.families import FAMILIES, family_module
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.sources import open_source
from tests.tiny import INDEX, llama_config, llama_tensors, write_llama, write_tokenizer

ROUNDS = 400
SECONDS = 2.0


def damage(content: bytes, source: random.Random) -> bytes:
    """`content` with one to three random faults of the kinds that disks, transfers and editors make."""
    data = bytearray(content)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(data) + 1)
        kind = source.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << source.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = source.choice(b'{}[]",:0123456789-.eE\\ \0\xff')
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + source.randint(1, 40)]
        elif kind == 4:
            data[at:at] = bytes(source.randrange(256) for _ in range(source.randint(1, 8)))
        elif kind == 5:
            data[at:at] = data[at : at + source.randint(1, 80)]
        else:
            data[at : at + 8] = bytes(8)
    return bytes(data)


def check_refusal(action: Callable[[], Any]) -> Any:
    """What `action` gives, or None where it refuses; anything but a one-line error with a hint fails, and slowness."""
    start, refused, result = time.process_time(), None, None
    try:
        result = action()
    except MgtpError as error:
        refused = error
    assert time.process_time() - start < SECONDS
    if refused is None:
        return result
    assert refused.hint
    assert "\n" not in refused.message
    assert len(refused.message) < 100_000
    return None


def outcome(folder: Path) -> Any:
    """The opened source, or None where it was refused or cannot be planned."""
    source = check_refusal(lambda: open_source(str(folder)))
    return source if source is not None and check_refusal(lambda: make_plan(source, 2)) is not None else None


def check_values(source: Any) -> None:
    for name, values in llama_tensors(llama_config()).items():
        assert source.rows(name, 0, len(values)).tobytes() == values.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_llama(tmp_path / "m", files=2)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX])
def test_damaged_headers_and_indexes(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    size = 8 + int.from_bytes(content[:8], "little") if name != INDEX else len(content)
    opened = 0
    for seed in range(ROUNDS):
        (folder / name).write_bytes(damage(content[:size], random.Random(seed)) + content[size:])
        source = outcome(folder)
        if source is not None:
            opened += 1
            check_values(source)
    assert opened < ROUNDS // 4


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_small_files(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for seed in range(ROUNDS):
        (folder / name).write_bytes(damage(content, random.Random(seed)))
        outcome(folder)


# Every kind of JSON value, with those that trip arithmetic: zero, negative, huge, not finite, nested, empty.
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 9999, 2**31, 2**60, 2**64, -(2**70), 10**400, 0.0, 0.5, -0.5, 1e-300, 1e300, -1e300,
    float("inf"), float("-inf"), float("nan"), "", "x", "silu", "default", "yarn", "1", [], [1], [None], [[[]]], {},
    {"a": {}}, {"rope_type": []}, ["full_attention"] * 2, ["sliding_attention"] * 2, "x" * 10_000, [0] * 10_000,
]  # fmt: skip

ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "alpha",
    "short_factor", "long_factor", "partial_rotary_factor",
)  # fmt: skip
KEYS = (
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "quantization_config", "text_config", "rope_scaling", "rope_parameters",
    "original_max_position_embeddings", "partial_rotary_factor", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
CLASSES = [name for family in FAMILIES for name in family_module(family).ARCHITECTURES]


def random_rope(source: random.Random) -> dict[str, Any]:
    kinds = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "mrope")
    rope: dict[str, Any] = {"rope_type": source.choice(kinds), "factor": source.choice([2.0, 8.0])}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    for key in source.sample(ROPE_KEYS, source.randint(0, 4)):
        rope[key] = source.choice(VALUES)
    return rope


def random_config(source: random.Random) -> dict[str, Any]:
    """A config that is almost right: one to four values of any kind in place of its own."""
    config = llama_config(architectures=[source.choice(CLASSES)])
    if source.random() < 0.6:
        config[source.choice(["rope_scaling", "rope_parameters"])] = random_rope(source)
    for key in source.sample(KEYS, source.randint(0, 3)):
        config[key] = source.choice(VALUES)
    if source.random() < 0.1:
        config = {"architectures": config["architectures"], "text_config": config}
    return config


def check_config(source: Any, config: dict[str, Any]) -> None:
    """Plan with `config` in place of the checkpoint's own."""
    check_refusal(lambda: make_plan(replace(source, config=config), 2))


def test_any_config_value_is_refused_or_understood(folder: Path) -> None:
    source = open_source(str(folder))
    for seed in range(10 * ROUNDS):
        check_config(source, random_config(random.Random(seed)))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_with_every_value(folder: Path, key: str) -> None:
    source = open_source(str(folder))
    for architecture in CLASSES:
        for value in VALUES:
            check_config(source, {**llama_config(architectures=[architecture]), key: value})
