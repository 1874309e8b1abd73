"""Cuts and sums that are wrong on purpose: each must show in the logits, else the tests of parity prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import mgtp.shardplan.families.gpt_oss as gpt_oss
import mgtp.shardplan.families.qwen3_5 as qwen3_5
from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.layers.builder import LayerBuilder
from mgtp.runtime.layers.delta_net import GatedDeltaNet
from mgtp.runtime.layers.moe import MixtureOfExperts, Router
from mgtp.runtime.parallel.linear import RowParallelLinear
from mgtp.runtime.parallel.norm import SplitRMSNorm
from mgtp.runtime.state_cache import StateCache
from mgtp.shardplan.partition import Cut, Segment, TensorSpec, rows, segmented
from tests.reference import load_reference, max_difference, recipe_prompt, reference_logits
from tests.thread_ranks import ThreadRanks

PROMPT = recipe_prompt(30)
VISIBLE = 0.1  # logits have a standard deviation of about 1.5

Sabotage = Callable[[pytest.MonkeyPatch], None]


def recut(module, generator: str, ending: str, change: Callable[[TensorSpec], Cut]) -> Sabotage:
    """Cut the tensors of `module.generator` whose names end with `ending` in another way."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, generator)

        def wrong(*args) -> Iterator[TensorSpec]:
            for spec in original(*args):
                yield replace(spec, cut=change(spec)) if spec.name.endswith(ending) else spec

        patch.setattr(module, generator, wrong)

    return sabotage


def equal_chunks(spec: TensorSpec) -> Cut:
    """Rows in as many equal chunks as there are key heads, whatever is packed in them."""
    return rows("delta_k_heads", spec.shape[0] // 3)


def halves(axis: str, size: int, block: int, dim: int) -> Callable[[TensorSpec], Cut]:
    """Two halves, one after the other, each cut along `axis`; the model has them interleaved."""
    return lambda spec: segmented(dim, (axis, block), (axis, block), sizes={axis: size})


def gates_in_halves(patch: pytest.MonkeyPatch) -> None:
    original = qwen3_5.common.projections

    def wrong(prefix, a, hidden, **options) -> Iterator[TensorSpec]:
        for spec in original(prefix, a, hidden, **options):
            if spec.name.endswith("q_proj.weight"):
                spec = replace(spec, cut=halves(a.q_axis, a.num_heads, a.head_dim, 0)(spec))
            yield spec

    patch.setattr(qwen3_5.common, "projections", wrong)


def local_norm(patch: pytest.MonkeyPatch) -> None:
    original = LayerBuilder.full_width_norm

    def wrong(build: LayerBuilder, prefix: str, a) -> SplitRMSNorm:
        norm = original(build, prefix, a)
        return SplitRMSNorm(norm.weights, [len(w) for w in norm.weights], norm.eps, SingleRank())

    patch.setattr(LayerBuilder, "full_width_norm", wrong)


def copied_keys_counted_again(patch: pytest.MonkeyPatch) -> None:
    original = SplitRMSNorm.__init__

    def wrong(norm, *args, counts=None) -> None:
        original(norm, *args)

    patch.setattr(SplitRMSNorm, "__init__", wrong)


def expert_bias_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    original = MixtureOfExperts.__init__

    def wrong(mixture, router, experts, communicator, down_bias=None) -> None:
        original(mixture, router, experts, communicator, None if down_bias is None else down_bias * communicator.size)

    patch.setattr(MixtureOfExperts, "__init__", wrong)


def output_bias_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    original = RowParallelLinear.__init__

    def wrong(linear, weight, bias, communicator, *args) -> None:
        original(linear, weight, None if bias is None else bias * communicator.size, communicator, *args)

    patch.setattr(RowParallelLinear, "__init__", wrong)


def ranks_route_differently(patch: pytest.MonkeyPatch) -> None:
    original = MixtureOfExperts.__init__

    def wrong(mixture, router: Router, experts, communicator, *args, **options) -> None:
        flip = communicator.rank > 0
        turned = Router(-router.weight if flip else router.weight, router.bias, router.pick)
        original(mixture, turned, experts, communicator, *args, **options)

    patch.setattr(MixtureOfExperts, "__init__", wrong)


CONTROLS: dict[str, tuple[str, int, Sabotage]] = {
    "delta net projections in equal chunks": ("qwen3_5", 3, recut(qwen3_5, "delta_net", "_qkv.weight", equal_chunks)),
    "delta net convolution in equal chunks": ("qwen3_5", 3, recut(qwen3_5, "delta_net", "conv1d.weight", equal_chunks)),
    "queries and gates as halves": ("qwen3_5", 2, gates_in_halves),
    "norm over a rank's own heads": ("olmo2", 2, local_norm),
    "copied key heads counted again": ("olmo2", 4, copied_keys_counted_again),
    "norm over a rank's own heads, OLMo 3": ("olmo3", 3, local_norm),
    "gate and up as halves": (
        "gpt_oss",
        3,
        recut(gpt_oss, "stacked_experts", "gate_up_proj", halves("expert_ffn", 21, 1, 2)),
    ),
    "gate and up biases as halves": (
        "gpt_oss",
        3,
        recut(gpt_oss, "stacked_experts", "gate_up_proj_bias", halves("expert_ffn", 21, 1, 1)),
    ),
    "down rows of another rank": (
        "gpt_oss",
        3,
        recut(gpt_oss, "stacked_experts", "down_proj", lambda spec: Cut(1, (Segment("expert_ffn", 1, -7),))),
    ),
    "expert bias on every rank": ("gpt_oss", 2, expert_bias_on_every_rank),
    "output bias on every rank": ("gpt_oss", 2, output_bias_on_every_rank),
    "ranks that route differently": ("qwen3_moe", 2, ranks_route_differently),
    "ranks that route differently, Mixtral": ("mixtral", 2, ranks_route_differently),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_cut_shows(control, recipe_checkpoint, monkeypatch):
    recipe, tp_size, sabotage = CONTROLS[control]
    folder = recipe_checkpoint(recipe)
    right = reference_logits(load_reference(str(folder)), PROMPT)
    assert max_difference(ThreadRanks(folder, tp_size).full(PROMPT), right) < 1e-4
    sabotage(monkeypatch)
    assert max_difference(ThreadRanks(folder, tp_size).full(PROMPT), right) > VISIBLE


def test_a_state_that_is_left_over_shows(recipe_checkpoint, monkeypatch):
    """A slot is used again by the next sequence: without clearing it would remember the last one."""
    ranks = ThreadRanks(recipe_checkpoint("qwen3_5"), 2)
    right = ranks.full(PROMPT)
    ranks.full(recipe_prompt(30, seed=2))
    assert max_difference(ranks.full(PROMPT), right) == 0
    monkeypatch.setattr(StateCache, "clear", lambda self, slots: None)
    assert max_difference(ranks.full(PROMPT), right) > VISIBLE


def test_a_lost_convolution_history_shows(recipe_checkpoint, monkeypatch):
    """Chunked prefill must carry the convolution's last inputs from chunk to chunk."""
    ranks = ThreadRanks(recipe_checkpoint("qwen3_5"), 2)
    right = ranks.full(PROMPT)
    assert max_difference(ranks.chunked(PROMPT, 7), right) < 1e-4
    original = GatedDeltaNet._convolve

    def wrong(net: GatedDeltaNet, inputs: torch.Tensor, batch, slots: torch.Tensor) -> torch.Tensor:
        batch.states.layer(net.index)[0][slots] = 0
        return original(net, inputs, batch, slots)

    monkeypatch.setattr(GatedDeltaNet, "_convolve", wrong)
    assert max_difference(ranks.chunked(PROMPT, 7), right) > VISIBLE
