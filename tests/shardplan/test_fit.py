"""Does it fit: numbers that can be worked out by hand, and agreement with what the runtime does with its memory."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgtp.runtime.cache_layout import cache_groups, kv_shape
from mgtp.runtime.capacity import CacheDemand, plan_blocks
from mgtp.shardplan import fit as fit_module
from mgtp.shardplan.config import DeltaNet, ModelConfig
from mgtp.shardplan.errors import DeviceError, UsageError
from mgtp.shardplan.families import parse_config
from mgtp.shardplan.fit import (
    BLOCK_TOKENS,
    CACHE_FRACTION,
    COLLECTIVE_BYTES,
    CONTEXT_BYTES,
    STEP_TOKENS,
    cache_needs,
    even_tp_sizes,
    fit,
    max_tp_size,
    rank_weights,
    smallest_tp_size,
    weight_kinds,
)
from mgtp.shardplan.partition import model_axes
from mgtp.shardplan.plan_report import check_fits, report_fit, report_plan
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.share_search import proportional_shares
from tests.shardplan.memory_source import llama_source
from tests.tiny import llama_config

GIB = 1 << 30


def llama_8b(**changes: Any) -> ModelConfig:
    """Llama 3.1 8B: 32 layers, 8 kv heads of 128, in bfloat16 128 KiB of keys and values a token."""
    return parse_config(
        llama_config(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            **changes,
        )
    )


def needs(model: ModelConfig, tp_size: int = 1, rank: int = 0, itemsize: int = 2) -> fit_module.CacheNeeds:
    return cache_needs(model, model_axes(model, [1] * tp_size), rank, itemsize)


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp_size", "kib"), [(1, 128), (2, 64), (8, 16), (16, 16), (32, 16)])
def test_bytes_per_token(tp_size: int, kib: int) -> None:
    """From 8 ranks on every rank has one kv head: copied heads take memory on each rank."""
    assert needs(llama_8b(), tp_size).bytes_per_token == kib * 1024


def test_kv_heads_are_not_always_equal() -> None:
    model = llama_8b()
    assert [needs(model, 3, r).bytes_per_token >> 10 for r in range(3)] == [48, 32, 48]


def test_windows_are_bounded() -> None:
    """16 of 32 layers see 4096 keys: 64 KiB a token without end, and at most window + step + block tokens of the rest."""
    full = llama_8b()
    assert full.layers[0].attention is not None
    windowed = replace(full.layers[0], attention=replace(full.layers[0].attention, window=4096))
    model = replace(full, layers=(full.layers[0], windowed) * 16)
    cache = needs(model)
    assert cache.bytes_per_token == 64 << 10
    assert cache.window_bytes == (4096 + STEP_TOKENS + BLOCK_TOKENS) * (64 << 10)
    assert cache.total(1, 1000) - cache.total(0, 1000) == 1008 * (128 << 10)


def test_layers_that_share_a_cache_have_none() -> None:
    full = llama_8b()
    assert full.layers[0].attention is not None
    sharing = replace(full.layers[0], attention=replace(full.layers[0].attention, kv_source=0))
    assert needs(replace(full, layers=(full.layers[0],) * 8 + (sharing,) * 24)).bytes_per_token == 32 << 10


def test_delta_net_state_is_fixed() -> None:
    """Per sequence and layer: 4 value heads of 8 x 16 in float32, and 3 inputs of 2*2*8 + 4*16 channels in bfloat16."""
    full = llama_8b()
    net = replace(full.layers[0], attention=None, delta_net=DeltaNet(2, 4, 8, 16, 4))
    cache = needs(replace(full, layers=(full.layers[0], net)))
    assert cache.state == 4 * 8 * 16 * 4 + 3 * (2 * 2 * 8 + 4 * 16) * 2
    assert cache.total(3, 16) == (3 + 1) * 16 * (4 << 10) + (3 + 1) * cache.state


@settings(max_examples=200, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(1, 5000)),
    budget=st.integers(0, 1 << 36),
    tp_size=st.sampled_from([1, 2, 3, 8, 16]),
    cp_size=st.sampled_from([1, 2, 3, 8]),
    itemsize=st.sampled_from([2, 4]),
)
def test_agrees_with_the_runtime(window: int | None, budget: int, tp_size: int, cp_size: int, itemsize: int) -> None:
    """The same blocks as the ranks make, and room for the longest context that is promised, and for no longer one."""
    full = llama_8b()
    assert full.layers[0].attention is not None
    windowed = replace(full.layers[0], attention=replace(full.layers[0].attention, window=window))
    model = replace(full, layers=(*full.layers[:3], windowed))
    axes = model_axes(model, [1] * tp_size)
    cache = cache_needs(model, axes, tp_size - 1, itemsize, cp_size)
    shapes = [[kv_shape(model, axes, tp_size - 1, layer) for layer in group.layers] for group in cache_groups(model)]
    blocks = [2 * BLOCK_TOKENS * itemsize * sum(heads * dim for heads, dim in layers) for layers in shapes]
    assert list(cache.groups) == [(g.window, b) for g, b in zip(cache_groups(model), blocks, strict=True)]
    longest = cache.longest(budget, model.max_position)
    for length, fits in ((longest, True), (longest + BLOCK_TOKENS * cp_size, False)):
        if 0 < length <= model.max_position:
            demand = CacheDemand(1, length, STEP_TOKENS, BLOCK_TOKENS, cp_size)
            with contextlib.nullcontext() if fits else pytest.raises(DeviceError):
                assert plan_blocks(model, axes, tp_size - 1, demand, budget, itemsize) == cache.blocks(1, length)


def test_constants_are_the_runtime_s() -> None:
    from mgtp.runtime.options import RankOptions

    options = RankOptions("", 1, "cpu", [])
    assert (options.block_size, options.max_batch_tokens, options.max_num_seqs) == (16, 2048, 16)
    assert (BLOCK_TOKENS, STEP_TOKENS, fit_module.NUM_SEQUENCES) == (16, 2048, 16)
    from mgtp.runtime.layers.context_attention import KERNEL_BYTES
    from mgtp.runtime.parallel import attention

    assert (attention.KEY_CHUNK, attention.CHUNK_NUMBERS) == (fit_module.KEY_CHUNK, fit_module.CHUNK_NUMBERS)
    assert (attention.GATHER_BYTES, KERNEL_BYTES) == (fit_module.GATHER_BYTES, fit_module.KERNEL_BYTES)


@given(st.integers(0, 1 << 40), st.integers(1, 200_000))
def test_counts_are_the_largest_that_fit(budget: int, length: int) -> None:
    cache = needs(llama_8b(), 2)
    count = cache.sequences(budget, length)
    assert count == 0 or cache.total(count, length) <= budget
    assert cache.total(count + 1, length) > budget
    longest = cache.longest(budget, 131072)
    assert longest == 0 or cache.total(1, longest) <= budget
    assert longest == 131072 or cache.total(1, longest + BLOCK_TOKENS) > budget


def test_context_ranks_share_out_the_cache() -> None:
    """Each of 4 keeps a quarter: a token costs it a quarter, and it has room for 4 times the context."""
    model, axes = llama_8b(), model_axes(llama_8b(), [1, 1])
    one, four = (cache_needs(model, axes, 0, 2, cp_size) for cp_size in (1, 4))
    assert one.bytes_per_token == 4 * four.bytes_per_token
    budget = one.total(1, 8192)
    assert (one.longest(budget, 131072), four.longest(budget, 131072)) == (8192, 4 * 8192)


# --- the whole device -------------------------------------------------------------------------------------------------


def fit_8b(device: int, tp_size: int = 1, length: int | None = None) -> fit_module.Fit:
    model = llama_8b()
    axes = model_axes(model, [1] * tp_size)
    return fit(model, axes, rank_weights(weight_kinds(model), axes, tp_size, 2), 2, [device] * tp_size, length)


def test_weights_from_the_model_alone() -> None:
    """8,030,261,248 parameters; the norms are on both ranks."""
    model = llama_8b()
    assert rank_weights(weight_kinds(model), model_axes(model, [1]), 1, 2) == [2 * 8_030_261_248]
    norms = 65 * 4096
    assert sum(rank_weights(weight_kinds(model), model_axes(model, [1, 1]), 2, 2)) == 2 * (8_030_261_248 + norms)


def test_8b_on_24_gib() -> None:
    found = fit_8b(24 * GIB).ranks[0]
    free = 24 * GIB - CONTEXT_BYTES - 2 * 8_030_261_248
    assert found.cache_budget == int(free * CACHE_FRACTION)
    assert found.longest_context == (found.cache_budget // (16 * (128 << 10)) - 1) * 16


def test_too_small() -> None:
    assert not fit_8b(15 * GIB).fits
    assert fit_8b(15 * GIB, 2).fits
    assert not fit_8b(24 * GIB, 1, length=131072).fits
    assert fit_8b(24 * GIB, 2, length=131072).fits


def test_collectives_count_from_two_ranks_on() -> None:
    assert [fit_8b(24 * GIB, n).ranks[0].collective_bytes for n in (1, 2)] == [0, COLLECTIVE_BYTES]


def test_smallest_tp_size() -> None:
    model = llama_8b()
    assert smallest_tp_size(model, 2, 24 * GIB) == 1
    assert smallest_tp_size(model, 2, 15 * GIB) == 2
    assert smallest_tp_size(model, 2, 24 * GIB, 131072) == 2
    assert smallest_tp_size(model, 2, 1 * GIB) is None
    n = smallest_tp_size(model, 4, 10 * GIB)
    assert n is not None and fit_like(model, n, 10 * GIB) and not fit_like(model, n - 1, 10 * GIB)


def fit_like(model: ModelConfig, n: int, device: int) -> bool:
    axes = model_axes(model, [1] * n)
    return fit(model, axes, rank_weights(weight_kinds(model), axes, n, 4), 4, [device] * n).fits


@settings(max_examples=50, deadline=None)
@given(device=st.integers(1 << 28, 1 << 36), tp_size=st.integers(1, 8), cp_size=st.integers(1, 3))
def test_every_byte_of_a_device_is_accounted_for(device: int, tp_size: int, cp_size: int) -> None:
    """Weights, workspace, what is set aside and the cache make up the device, also where it is too small."""
    source = llama_source("bfloat16", num_attention_heads=8, num_key_value_heads=4)
    report = report_fit(make_plan(source, tp_size), parse_config(source.config), [device], None, cp_size)
    for r in report.ranks:
        assert r.weight_bytes + r.workspace_bytes + r.set_aside_bytes + r.cache_bytes == r.device_bytes == device
        assert r.kept_back_bytes >= 0 and (r.collective_bytes > 0) == (tp_size * cp_size > 1)
    assert report.fits == (report.longest_context > 0)


def test_attention_across_ranks_is_counted() -> None:
    """By hand, over 2 ranks: 4 KiB of keys and values a token, 1024 queries of 32 heads; the ring only for long ones."""
    model, axes = llama_8b(), model_axes(llama_8b(), [1])
    alone = fit_module.workspace_bytes(model, axes, 0, 2)

    def taken(length: int) -> int:
        return fit_module.workspace_bytes(model, axes, 0, 2, fit_module.StepSize(cp_size=2, length=length)) - alone

    new, token = 3 * 2048 * 4096, 4096
    assert taken(131072) == new + 2 * 65536 * token + 2 * 131072 * token
    chunk = (1 << 26) // (32 * 1024)
    scores = 4 * chunk * (3 * 32 * 1024 + 2 * 8 * 128)
    assert taken(1 << 19) == new + 3 * (1 << 18) * token + scores + 8 * 4 * 1024 * 32 * 128
    found = [fit(model, axes, [16 * GIB], 2, [24 * GIB], None, cp_size).ranks[0] for cp_size in (1, 2)]
    assert found[1].workspace_bytes - found[0].workspace_bytes == taken(131072)


def test_attention_across_ranks_with_a_window_is_bounded() -> None:
    model, axes = llama_8b(), model_axes(llama_8b(), [1])
    assert model.layers[0].attention is not None
    layer = replace(model.layers[0], attention=replace(model.layers[0].attention, window=4096))
    sizes = [
        fit_module.workspace_bytes(
            replace(model, layers=(layer,)), axes, 0, 2, fit_module.StepSize(cp_size=2, length=n)
        )
        for n in (8192, 131072)
    ]
    assert sizes[0] == sizes[1]


# --- even sizes and shares --------------------------------------------------------------------------------------------


def test_even_sizes() -> None:
    assert even_tp_sizes(llama_8b()) == [1, 2, 4, 8, 16, 32]
    smollm = parse_config(
        llama_config(
            num_attention_heads=9, num_key_value_heads=3, hidden_size=576, intermediate_size=1536, vocab_size=49152
        )
    )
    assert even_tp_sizes(smollm) == [1, 3]
    assert max_tp_size(smollm) == 9


@pytest.mark.parametrize(
    ("gib", "shares"),
    [((24, 12, 12), [2, 1, 1]), ((80, 80), [1, 1]), ((24, 24, 12), [2, 2, 1]), ((80, 40, 24), None), ((24, 1), None)],
)
def test_proportional_shares(gib: tuple[int, ...], shares: list[int] | None) -> None:
    """Within 8 % of what is left after the fixed costs, in the smallest numbers."""
    fixed = GIB
    found = proportional_shares([g * GIB for g in gib], fixed)
    assert shares is None or found == shares
    if min(gib) > 1:
        left = [g * GIB - fixed for g in gib]
        ratios = [share / size for share, size in zip(found, left, strict=True)]
        assert max(ratios) / min(ratios) < 1.18


# --- the report -------------------------------------------------------------------------------------------------------


def test_report_of_a_plan() -> None:
    source = llama_source("bfloat16", num_attention_heads=9, num_key_value_heads=3, head_dim=8, intermediate_size=90)
    plan = make_plan(source, 2)
    report = report_plan("m", plan, parse_config(source.config), is_shard_set=False)
    assert [r.parts for r in report.ranks] == [
        {"q_heads": 6, "kv_heads": 2, "ffn": 45, "vocab": 160},
        {"q_heads": 3, "kv_heads": 1, "ffn": 45, "vocab": 160},
    ]
    assert [r.file_bytes for r in report.ranks] == [r.bytes for r in plan.ranks]
    assert [r.weight_bytes for r in report.ranks] == rank_weights(
        weight_kinds(parse_config(source.config)), model_axes(parse_config(source.config), [1, 1]), 2, 2
    )
    sizes = [r.weight_bytes for r in report.ranks]
    assert report.imbalance == pytest.approx(max(sizes) / (sum(sizes) / 2))
    assert report.fingerprint is None and report.even_tp_sizes == [1]  # 320 rows do not divide by 3


def test_fit_of_unequal_devices_proposes_shares() -> None:
    source = llama_source("bfloat16")
    plan = make_plan(source, 3)
    found = report_fit(plan, parse_config(source.config), [24 * GIB, 12 * GIB, 12 * GIB], None)
    assert found.proposed_shares == [2, 1, 1] and found.fits
    same = report_fit(
        make_plan(source, 3, shares=[2, 1, 1]), parse_config(source.config), [24 * GIB, 12 * GIB, 12 * GIB], None
    )
    assert same.proposed_shares is None


SMOLLM2 = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip


def test_the_search_for_shares_goes_on_until_it_finds_no_better() -> None:
    """Whatever shares a plan has, the same is proposed, which has no better proposal itself."""
    source, devices = llama_source("bfloat16", **SMOLLM2), [size << 20 for size in (1800, 1590, 1590)]
    model = parse_config(source.config)
    first = report_fit(make_plan(source, 3), model, devices, None)
    assert first.proposed_shares and first.proposed_longest_context
    other = report_fit(make_plan(source, 3, shares=[4, 1, 1]), model, devices, None)
    assert other.proposed_shares == first.proposed_shares
    best = report_fit(make_plan(source, 3, shares=first.proposed_shares), model, devices, None)
    assert best.proposed_shares is None and best.longest_context >= 2720 > first.longest_context


def test_no_shares_are_proposed_where_none_fit() -> None:
    source = llama_source("float32", **SMOLLM2)
    model, plan = parse_config(source.config), make_plan(source, 3)
    found = report_fit(plan, model, [2 * GIB, GIB, GIB], None)
    assert not found.fits and (found.proposed_shares, found.proposed_longest_context) == (None, None)
    found = report_fit(
        make_plan(llama_source("bfloat16", **SMOLLM2), 3), model, [1800 << 20, 1560 << 20, 1560 << 20], 8192
    )
    assert not found.fits and found.proposed_shares is None


def test_wrong_questions() -> None:
    source = llama_source()
    plan, model = make_plan(source, 3), parse_config(source.config)
    with pytest.raises(UsageError, match="--device-memory has 2 sizes, there are 3 rank"):
        report_fit(plan, model, [GIB, GIB], None)
    with pytest.raises(UsageError, match="--max-model-len 257 is more than the model's 256 positions"):
        report_fit(plan, model, [GIB], 257)


def test_what_does_not_fit_names_a_way_out() -> None:
    source = llama_source()
    plan, model = make_plan(source, 1), parse_config(source.config)
    report = report_fit(plan, model, [CONTEXT_BYTES], None)
    with pytest.raises(DeviceError, match=r"m in float32 does not fit at tp size 1: of .* so 0 are left") as caught:
        check_fits("m", 1, "float32", report)
    assert "no tp size makes it fit" in caught.value.hint
    check_fits("m", 1, "float32", report_fit(plan, model, [24 * GIB], 256))
