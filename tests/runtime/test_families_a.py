"""Gemma 3 and 4, ERNIE 4.5, HunYuan, Phi-3, GLM-4 and Granite against transformers, at tp sizes that divide nothing.

Guards against what these families add: norms and factors that are skipped, rounded or cast elsewhere, packed tensors cut
across their segments, rotations of part of a head or in other pairs, windows, and keys shared between layers.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import random_variants
from tests.rank_jobs import greedy, run_requests
from tests.reference import (
    assert_close,
    load_reference,
    max_difference,
    recipe_prompt,
    reference_cached_logits,
    reference_greedy,
    reference_logits,
)
from tests.thread_ranks import ThreadRanks
from tests.variants import VARIANTS, build_variant

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
SIZES = dict.fromkeys(RECIPES, (1, 2, 3, 4)) | dict.fromkeys(("gemma4_keqv", "phi3"), (1, 2, 3, 4, 6))

PROMPT = recipe_prompt(26, vocab=97)  # more than a window, less than Phi-3's original length
FIRST = 19  # tokens that go into the cache at once
NEW = 12  # further tokens, with which Phi-3 exceeds its original length


@cache
def expected(folder: str, dtype: str = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's logits of PROMPT: in one pass, and with its cache."""
    model = load_reference(folder, dtype)
    return reference_logits(model, PROMPT), reference_cached_logits(model, PROMPT, FIRST)


def limit_in_float64(full: torch.Tensor, cached: torch.Tensor) -> float:
    """What may differ in float64: next to nothing, or what the reference itself differs by."""
    return max(2e-6, 2 * max_difference(full[FIRST - 1 :], cached))


@pytest.mark.parametrize(("name", "tp_size"), [(name, tp) for name, sizes in SIZES.items() for tp in sizes])
def test_logits_and_ids_in_float32(name, tp_size, world, recipe_checkpoint, sharded):
    folder = recipe_checkpoint(name)
    full, cached = expected(str(folder))
    ranks = ThreadRanks(folder, tp_size)
    assert_close(ranks.full(PROMPT), full, 1e-4, "full")
    assert_close(ranks.cached(PROMPT, FIRST), cached, 1e-4, "cached")
    assert_close(ranks.chunked(PROMPT, 7), full, 1e-4, "in pieces")
    ids = world.run(tp_size, greedy, sharded(folder, tp_size), PROMPT, NEW)[0]
    assert ids == reference_greedy(load_reference(str(folder)), PROMPT, NEW)


@pytest.mark.parametrize("tp_size", [1, 3, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_logits_in_float64(name, tp_size, recipe_checkpoint):
    """Nearly bit-exact: float64 sums leave no room for a small fault to hide in."""
    folder = recipe_checkpoint(name, "float64")
    full, cached = expected(str(folder), "float64")
    limit, ranks = limit_in_float64(full, cached), ThreadRanks(folder, tp_size, "float64")
    assert_close(ranks.full(PROMPT), full, limit, "full")
    assert_close(ranks.cached(PROMPT, FIRST), cached, limit, "cached")


@pytest.mark.parametrize("name", RECIPES)
def test_bfloat16_errs_no_more_than_the_reference(name, recipe_checkpoint):
    """Casts and roundings in other places than the reference's would add up to more than its own error."""
    folder = recipe_checkpoint(name)
    want = expected(str(folder))[0]
    own_error = (reference_logits(load_reference(str(folder), "bfloat16"), PROMPT) - want).square().mean().sqrt()
    for tp_size in (1, 3):
        ours = ThreadRanks(folder, tp_size, "bfloat16").full(PROMPT)
        error = (ours.float() - want).square().mean().sqrt()
        assert error <= 2 * own_error, f"tp {tp_size}: {error:.3g}, the reference {own_error:.3g}"


@pytest.mark.parametrize("name", ["gemma3", "gemma4_e", "gemma4_keqv", "hunyuan", "phi3"])
def test_mixed_requests_equal_single_ones(name, world, recipe_checkpoint, sharded):
    """Requests of all lengths together, prompts in pieces, blocks freed behind windows: tokens stay the same."""
    from mgtp.runtime.sampling_params import SamplingParams

    folder = recipe_checkpoint(name)
    prompts = [recipe_prompt(n, seed=n) for n in (3, 29, 17, 1, 12)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 5, 12, 7, 3)]
    model = load_reference(str(folder))
    want = [reference_greedy(model, p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    options = {"max_num_seqs": 3, "max_batch_tokens": 16, "block_size": 4, "max_model_len": 48}
    assert world.run(2, _run_with, sharded(folder, 2), prompts, params, options)[0] == want


def _run_with(communicator, shard_set, prompts, params, options):
    return run_requests(communicator, shard_set, prompts, params, **options)


@pytest.fixture(scope="module")
def variant_checkpoint(tmp_path_factory):
    """A function that saves a model of tests/variants.py and gives its folder."""

    @cache
    def checkpoint(label: str) -> Path:
        folder = tmp_path_factory.mktemp("variant")
        build_variant(label).save_pretrained(folder)
        return folder

    return checkpoint


@pytest.mark.parametrize("label", VARIANTS)
def test_other_shapes(label, variant_checkpoint):
    """Heads, widths, windows, patterns and options other than the recipes', up to one rank a query head."""
    folder = variant_checkpoint(label)
    full, cached = expected(str(folder))
    config = load_reference(str(folder)).config.get_text_config()
    for tp_size in (1, 2, 3, config.num_attention_heads):
        ranks = ThreadRanks(folder, tp_size)
        assert_close(ranks.full(PROMPT), full, 1e-4, f"tp {tp_size}, full")
        assert_close(ranks.cached(PROMPT, FIRST), cached, 1e-4, f"tp {tp_size}, cached")


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 3))])
@pytest.mark.parametrize("recipe", random_variants.RECIPES)
def test_random_shapes(recipe, seed, tmp_path):
    """In float64, where deep models do not blow up the noise of sums in another order."""
    model = random_variants.build_random(recipe, seed)
    heads = model.config.num_attention_heads
    model.double().save_pretrained(tmp_path)
    full, cached = expected(str(tmp_path), "float64")
    limit = limit_in_float64(full, cached)
    for tp_size in sorted({1, min(2, heads), (heads + 1) // 2, heads}):
        ranks = ThreadRanks(tmp_path, tp_size, "float64")
        assert_close(ranks.full(PROMPT), full, limit, f"tp {tp_size}, full")
        assert_close(ranks.cached(PROMPT, FIRST), cached, limit, f"tp {tp_size}, cached")
        # The softmax is in float32 even so, and sums over fewer keys at a time round in another way.
        assert_close(ranks.chunked(PROMPT, 7), full, 1e-4, f"tp {tp_size}, in pieces")


def test_leftover_keys_of_sharing_layers_change_nothing(recipe_checkpoint, tmp_path):
    """Released Gemma 4 files hold keys and values that no layer uses."""
    folder = recipe_checkpoint("gemma4_e")
    tensors = load_file(folder / "model.safetensors")
    extra = {f"model.layers.5.self_attn.{n}.weight": torch.randn(72, 52) for n in ("k_proj", "v_proj")}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", tmp_path)
    ranks = ThreadRanks(tmp_path, 2)
    assert_close(ranks.full(PROMPT), expected(str(folder))[0], 1e-4, "full")


@pytest.mark.parametrize("name", ["gemma4_vl", "gemma3_vl"])
def test_placeholder_ids_in_a_prompt(name, recipe_checkpoint):
    """The reference reads the ids of images, videos and sound as padding (Gemma 4), or as they are (Gemma 3)."""
    folder, prompt = recipe_checkpoint(name), [20, 5, 30, 6, 7, 5, 40, 50]
    want = reference_logits(load_reference(str(folder)), prompt)
    assert_close(ThreadRanks(folder, 2).full(prompt), want, 1e-4, name)


def test_longrope_goes_by_the_longer_of_prompt_and_position(recipe_checkpoint):
    """A prompt beyond the original length takes the long factors from its first token on, as the reference does."""
    folder, prompt = recipe_checkpoint("phi3"), recipe_prompt(45)
    model, ranks = load_reference(str(folder)), ThreadRanks(folder, 2)
    assert_close(ranks.full(prompt), reference_logits(model, prompt), 1e-4, "full")
    assert_close(ranks.cached(prompt, 30), reference_cached_logits(model, prompt, 30), 1e-4, "across the length")
