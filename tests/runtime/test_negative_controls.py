"""Cuts, sums and formulas that are wrong on purpose: each must show in the logits, else the tests of parity prove nothing.

Here for Gemma 3 and 4, ERNIE 4.5, HunYuan, Phi-3, GLM-4 and Granite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.layers.builder import LayerBuilder
from mgtp.runtime.layers.self_attention import SelfAttention
from mgtp.runtime.models import gemma4 as gemma4_forward
from mgtp.runtime.models.decoder import SandwichLayer, everything
from mgtp.runtime.parallel.linear import RowParallelLinear, VocabParallelEmbedding
from mgtp.shardplan.families import common, gemma4
from mgtp.shardplan.partition import Cut, TensorSpec, rows
from tests.reference import load_reference, max_difference, recipe_prompt, reference_logits
from tests.thread_ranks import ThreadRanks

PROMPT = recipe_prompt(30)
VISIBLE = 0.1  # logits have a standard deviation of about 1.5; Granite's are divided by 8

Sabotage = Callable[[pytest.MonkeyPatch], None]


def recut(generator: str, ending: str, cut: Cut) -> Sabotage:
    """Cut the tensors of `common.generator` whose names end with `ending` in another way."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        original = getattr(common, generator)

        def wrong(*args: Any, **options: Any) -> Iterator[TensorSpec]:
            for spec in original(*args, **options):
                yield replace(spec, cut=cut) if spec.name.endswith(ending) else spec

        patch.setattr(common, generator, wrong)

    return sabotage


def changed(owner: Any, method: str, wrong: Callable[..., Any]) -> Sabotage:
    """`wrong(original, *args)` in place of a method or function."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, method)
        patch.setattr(owner, method, lambda *args, **options: wrong(original, *args, **options))

    return sabotage


def bias_on_every_rank(original, linear, weight, bias, communicator, *args) -> None:
    original(linear, weight, None if bias is None else bias * communicator.size, communicator, *args)


def norm_before_the_sum(original, layer, x, residual, batch, keep=everything) -> Any:
    """What the post norm makes of partial sums, added up."""
    everybody = layer.mixer.o_proj.communicator
    layer.mixer.o_proj.communicator = SingleRank()
    try:
        x, residual = layer.before_mixer.add(x, residual)
        x = everybody.all_reduce(layer.after_mixer(keep(layer.mixer(x, batch))))
    finally:
        layer.mixer.o_proj.communicator = everybody
    x, residual = layer.before_mlp.add(x, keep(residual))
    return layer.after_mlp(layer.mlp(x)), residual


def unmasked_lookup(original, embedding, ids) -> torch.Tensor:
    """Ids of other ranks add a row of this rank."""
    start, stop = embedding.rows
    return embedding.communicator.all_reduce(embedding.weight[(ids - start).clamp(0, stop - start - 1)])


def keys_of_the_first_layer(original, reader, default_window) -> Any:
    """Sharing layers use the first layer of their type instead of the last one."""
    layers = original(reader, default_window)
    first = {layer.attention.window: i for i, layer in reversed(list(enumerate(layers)))}
    return [
        layer
        if layer.attention.kv_source is None
        else replace(layer, attention=replace(layer.attention, kv_source=first[layer.attention.window]))
        for layer in layers
    ]


def without(**options: Any) -> Callable[..., Any]:
    """The original with some of its options set otherwise."""
    return lambda original, *args, **given: original(*args, **{**given, **options})


def rope_with(**fields: Any) -> Callable[..., Any]:
    """A rotation that differs in some fields."""
    return lambda original, *args, **options: replace(original(*args, **options), **fields)


def scales_with(**fields: Any) -> Callable[..., Any]:
    """A model whose constants differ in some fields."""

    return lambda original, *args, scales, **options: original(*args, scales=replace(scales, **fields), **options)


CONTROLS: dict[str, tuple[str, int, Sabotage]] = {
    # cuts and sums
    "packed q, k and v in equal chunks": (
        "phi3",
        3,
        recut("packed_projections", "qkv_proj.weight", rows("kv_heads", 64)),
    ),
    "packed gate and up in equal chunks": ("phi3", 3, recut("packed_mlp", "gate_up_proj.weight", rows("ffn", 2))),
    "packed gate and up in equal chunks, GLM-4": (
        "glm4",
        3,
        recut("packed_mlp", "gate_up_proj.weight", rows("ffn", 2)),
    ),
    "output bias on every rank": ("ernie4_5", 2, changed(RowParallelLinear, "__init__", bias_on_every_rank)),
    "post norm before the sum": ("gemma3", 2, changed(SandwichLayer, "__call__", norm_before_the_sum)),
    "post norm before the sum, GLM-4": ("glm4", 2, changed(SandwichLayer, "__call__", norm_before_the_sum)),
    "per-layer embeddings of all ranks": ("gemma4_e", 2, changed(VocabParallelEmbedding, "_look_up", unmasked_lookup)),
    # formulas
    "keys of another layer": ("gemma4_e", 2, changed(gemma4, "_layers", keys_of_the_first_layer)),
    "norm by w for one plus w": ("gemma3", 1, changed(LayerBuilder, "norm", without(one_plus=False))),
    "norm by one plus w for w": ("gemma4_keqv", 1, changed(LayerBuilder, "norm", without(one_plus=True))),
    "values without a norm": ("gemma4_e", 1, changed(SelfAttention, "__init__", without(v_norm=None))),
    "norm before rotation": ("hunyuan", 1, changed(SelfAttention, "__init__", without(norm_after_rotation=False))),
    "pairs of halves": ("ernie4_5", 1, changed(common, "parse_rope", rope_with(interleaved=False))),
    "pairs of halves, GLM-4": ("glm4", 1, changed(common, "parse_rope", rope_with(interleaved=False))),
    "plain theta": ("hunyuan", 1, changed(common, "parse_rope", rope_with(kind="default"))),
    "no per-layer branch": (
        "gemma4_e",
        1,
        changed(gemma4_forward.PerLayerBranch, "__call__", lambda original, branch, x, inputs: x * 0),
    ),
    "embeddings as they are": ("granite", 1, changed(common, "model_config", scales_with(embedding=1.0))),
    "branches as they are": ("granite", 1, changed(common, "model_config", scales_with(residual=1.0))),
    "logits as they are": ("granite", 1, changed(common, "model_config", scales_with(logit_divisor=1.0))),
    "logits without a cap": ("gemma3", 1, changed(common, "model_config", scales_with(logit_softcap=None))),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_fault_shows(control, recipe_checkpoint, monkeypatch):
    recipe, tp_size, sabotage = CONTROLS[control]
    folder = recipe_checkpoint(recipe)
    right = reference_logits(load_reference(str(folder)), PROMPT)
    assert max_difference(ThreadRanks(folder, tp_size).full(PROMPT), right) < 1e-4
    sabotage(monkeypatch)
    assert max_difference(ThreadRanks(folder, tp_size).full(PROMPT), right) > VISIBLE
