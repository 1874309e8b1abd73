"""Gemma 3 and 4, ERNIE 4.5, HunYuan, Phi-3, GLM-4 and Granite against transformers, at tp sizes that divide nothing.

Guards against what these families add: norms and factors that are skipped, rounded or cast elsewhere, packed tensors cut
across their segments, rotations of part of a head or in other pairs, windows, and keys shared between layers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.rank_jobs import cached_logits, full_logits, greedy, run_requests
from tests.reference import (
    assert_close,
    load_reference,
    max_difference,
    recipe_prompt,
    reference_cached_logits,
    reference_greedy,
    reference_logits,
)

RECIPES = (
    "gemma3",
    "gemma3_vl",
    "gemma4_e",
    "gemma4_keqv",
    "gemma4_vl",
    "ernie4_5",
    "hunyuan",
    "phi3",
    "granite",
    "glm4",
)
PROMPT = recipe_prompt(30)
FIRST = 11  # tokens that go into the cache at once


@lru_cache(maxsize=None)
def expected(folder: str, dtype: str = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's logits of PROMPT: in one pass, and with its cache."""
    model = load_reference(folder, dtype)
    return reference_logits(model, PROMPT), reference_cached_logits(model, PROMPT, FIRST)


@pytest.mark.parametrize("tp_size", (1, 2, 3, 4, 6))
@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_ids_in_float32(name, tp_size, world, recipe_checkpoint, sharded):
    folder = recipe_checkpoint(name)
    full, cached = expected(str(folder))
    shard_set = sharded(folder, tp_size)
    for ours in world.run(tp_size, full_logits, shard_set, PROMPT):
        assert_close(ours, full, 1e-4, "full")
    for ours in world.run(tp_size, cached_logits, shard_set, PROMPT, FIRST):
        assert_close(ours, cached, 1e-4, "cached")
    ids = world.run(tp_size, greedy, shard_set, PROMPT, 24)[0]
    assert ids == reference_greedy(load_reference(str(folder)), PROMPT, 24)


@pytest.mark.parametrize("tp_size", (1, 2, 3, 4))
@pytest.mark.parametrize("name", RECIPES)
def test_logits_in_float64(name, tp_size, world, recipe_checkpoint, sharded):
    """Nearly bit-exact: float64 sums leave no room for a small fault to hide in."""
    folder = recipe_checkpoint(name, "float64")
    full, cached = expected(str(folder), "float64")
    limit = max(2e-6, 2 * max_difference(full[FIRST - 1 :], cached))
    shard_set = sharded(folder, tp_size, "float64")
    print(name, tp_size, "gap", max_difference(full[FIRST - 1 :], cached), "full", max_difference(world.run(tp_size, full_logits, shard_set, PROMPT)[0], full), "cached", max_difference(world.run(tp_size, cached_logits, shard_set, PROMPT, FIRST)[0], cached))
    assert_close(world.run(tp_size, full_logits, shard_set, PROMPT)[0], full, limit, "full")
    assert_close(world.run(tp_size, cached_logits, shard_set, PROMPT, FIRST)[0], cached, limit, "cached")
