"""Continuous batching without a model: every block has one owner, everyone gets served, nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mgtp.runtime.blocks import SCRATCH_BLOCK, BlockPool
from mgtp.runtime.cache_layout import CacheGroup
from mgtp.runtime.messages import Request
from mgtp.runtime.sampling_params import SamplingParams
from mgtp.runtime.scheduler import Scheduler
from mgtp.shardplan.fit import CacheNeeds


def request(name: str, prompt: int, output: int) -> Request:
    return Request(name, list(range(prompt)), SamplingParams(max_tokens=output), [])


def make(num_blocks=(20,), windows=(None,), block_size=4, max_num_seqs=4, max_batch_tokens=16, **options) -> Scheduler:
    groups = [CacheGroup(window, (i,)) for i, window in enumerate(windows)]
    pools = [BlockPool(g, n, block_size) for g, n in zip(groups, num_blocks, strict=True)]
    return Scheduler(pools, max_num_seqs, max_batch_tokens, **options)


def run_step(scheduler: Scheduler) -> list:
    """Schedule, check the step, and pretend that every sampled token is 7; ends sequences at their max_tokens."""
    scheduled = scheduler.schedule()
    check_ownership(scheduler)
    for s in scheduled:
        check_tables(scheduler, s)
        if s.step.sample:
            s.sequence.output_ids.append(7)
            if len(s.sequence.output_ids) >= s.sequence.request.sampling.max_tokens:
                scheduler.finish(s.sequence)
    return scheduled


def check_ownership(scheduler: Scheduler) -> None:
    """Every block is free, or in as many tables as it has holders; waiting sequences hold nothing."""
    for g, pool in enumerate(scheduler.pools):
        held = Counter(b for s in scheduler.running for b in s.tables[g] if b != SCRATCH_BLOCK)
        assert all(pool.holders(b) == count for b, count in held.items())
        assert sorted([*held, *pool._free]) == list(range(1, pool.num_blocks))
        assert scheduler.prefix_caching or set(held.values()) <= {1}
    assert all(not any(s.tables) and s.slot == -1 for s in scheduler.waiting)
    slots = [s.slot for s in scheduler.running]
    assert len(set(slots)) == len(slots)


def check_tables(scheduler: Scheduler, scheduled) -> None:
    """The step's tables reach its last token, and every key that its queries can see is in a block of its own."""
    step = scheduled.step
    for pool, table in zip(scheduler.pools, step.tables, strict=True):
        last = step.start + step.num_tokens - 1
        assert len(table) * pool.block_size > last
        first = pool.group.first_needed(step.start) // pool.block_size
        assert SCRATCH_BLOCK not in table[first : last // pool.block_size + 1]


def test_long_prompts_are_cut_to_the_token_budget_and_decoding_goes_on():
    scheduler = make(num_blocks=(40,))
    scheduler.add(request("short", 3, 10))
    run_step(scheduler)
    scheduler.add(request("long", 40, 2))
    for _ in range(3):
        step = run_step(scheduler)
        assert [s.sequence.request.id for s in step] == ["short", "long"]
        assert sum(s.step.num_tokens for s in step) <= 16
        assert step[0].step.sample


def test_first_come_first_served_even_when_a_later_one_would_fit():
    scheduler = make(num_blocks=(6,))
    scheduler.add(request("running", 12, 4))
    run_step(scheduler)
    scheduler.add(request("large", 16, 1))
    scheduler.add(request("small", 1, 1))
    assert [s.sequence.request.id for s in run_step(scheduler)] == ["running"]


def test_when_blocks_run_out_the_youngest_is_computed_again():
    scheduler = make(num_blocks=(6,), max_batch_tokens=100)
    scheduler.add(request("old", 8, 12))
    scheduler.add(request("young", 8, 12))
    done = []
    for _ in range(100):
        done += [s.sequence.request.id for s in run_step(scheduler) if s.sequence.slot == -1 and s.step.sample]
    assert scheduler.num_preemptions > 0
    assert done.index("old") < done.index("young")
    assert not scheduler.has_work


def test_blocks_behind_the_window_are_given_back():
    scheduler = make(num_blocks=(40, 8), windows=(None, 8), max_batch_tokens=8)
    scheduler.add(request("a", 60, 60))
    for _ in range(70):
        run_step(scheduler)
        for sequence in scheduler.running:
            held = [b for b in sequence.tables[1] if b != SCRATCH_BLOCK]
            assert len(held) <= (8 + 8) // 4 + 1
    assert not scheduler.has_work


@given(
    window=st.integers(1, 60),
    step=st.integers(1, 50),
    block=st.sampled_from([1, 2, 4, 8, 16, 32, 48]),
    length=st.integers(2, 200),
    sequences=st.integers(1, 3),
    prefix_caching=st.booleans(),
)
@example(window=4, step=24, block=32, length=128, sequences=1, prefix_caching=True)  # once went round for ever
def test_the_blocks_that_the_plan_counts_are_enough_for_full_sequences(
    window, step, block, length, sequences, prefix_caching
):
    blocks = CacheNeeds(((None, 1), (window, 1)), 0, block, step).blocks(sequences, length)
    limits = {"max_num_seqs": sequences, "max_batch_tokens": step, "prefix_caching": prefix_caching}
    scheduler = make(blocks, (None, window), block, **limits)
    for i in range(sequences):
        scheduler.add(request(str(i), length - 1, 1))
    for _ in range(sequences * length):
        if not scheduler.has_work:
            break
        run_step(scheduler)
    assert not scheduler.has_work
    assert scheduler.num_preemptions == 0


def test_abort_frees_at_once_and_unknown_ids_are_ignored():
    scheduler = make()
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 5, 5))
    run_step(scheduler)
    scheduler.abort("b")
    scheduler.abort("nobody")
    check_ownership(scheduler)
    assert [s.request.id for s in scheduler.running] == ["a", "c"]


def tokens_at(scheduled) -> int:
    return scheduled.step.start


def test_a_shared_beginning_is_computed_once():
    scheduler = make(num_blocks=(40,), max_batch_tokens=100, prefix_caching=True)
    scheduler.add(request("first", 22, 3))
    run_step(scheduler)
    scheduler.add(request("same", 22, 3))
    assert {s.sequence.request.id: tokens_at(s) for s in run_step(scheduler)} == {"first": 22, "same": 20}
    while scheduler.has_work:
        run_step(scheduler)
    scheduler.add(request("later", 30, 3))
    assert tokens_at(run_step(scheduler)[0]) == 20


def test_blocks_of_the_same_step_are_not_shared():
    """They are only being written: a layer's reads and writes would have to be ordered within the step."""
    scheduler = make(num_blocks=(40,), max_batch_tokens=100, prefix_caching=True)
    scheduler.add(request("a", 12, 1))
    scheduler.add(request("b", 12, 1))
    assert [tokens_at(s) for s in run_step(scheduler)] == [0, 0]


def test_a_different_beginning_shares_nothing_though_a_later_block_is_equal():
    scheduler = make(num_blocks=(40,), max_batch_tokens=100, prefix_caching=True)
    scheduler.add(request("a", 12, 1))
    run_step(scheduler)
    scheduler.add(Request("b", [99, *range(1, 12)], SamplingParams(max_tokens=1), []))
    assert tokens_at(run_step(scheduler)[0]) == 0


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token():
    scheduler = make(num_blocks=(40,), max_batch_tokens=100, prefix_caching=True)
    for name in ("a", "b"):
        scheduler.add(request(name, 16, 1))
        step = run_step(scheduler)[0].step
        assert step.sample
    assert (step.start, step.num_tokens) == (12, 4)


def test_answers_are_found_in_the_next_turn():
    scheduler = make(num_blocks=(40,), max_batch_tokens=100, prefix_caching=True)
    scheduler.add(request("a", 10, 9))
    while scheduler.has_work:
        run_step(scheduler)
    scheduler.add(Request("b", [*range(10), *[7] * 9, 50], SamplingParams(max_tokens=1), []))
    assert tokens_at(run_step(scheduler)[0]) == 16


def test_cached_blocks_give_way_when_room_is_needed():
    scheduler = make(num_blocks=(8,), max_batch_tokens=100, prefix_caching=True)
    scheduler.add(request("a", 20, 1))
    run_step(scheduler)
    scheduler.add(Request("b", [5] * 27, SamplingParams(max_tokens=1), []))
    run_step(scheduler)
    assert not scheduler.has_work
    scheduler.add(request("a", 20, 1))
    assert tokens_at(run_step(scheduler)[0]) == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_joins_aborts_and_preemptions_leak_nothing(seed, prefix_caching):
    rng = random.Random(seed)
    windows = rng.choice([(None,), (8,), (None, 8), (None, 5, 12)])
    size = rng.choice([1, 4]) if windows == (8,) else 4
    scheduler = make(
        [rng.randint(17, 30) + 12 * (size == 1) for _ in windows], windows, size, prefix_caching=prefix_caching
    )
    alive, finished, added = set(), set(), 0
    for _ in range(400):
        if rng.random() < 0.3:
            scheduler.add(request(str(added), rng.randint(1, 40), rng.randint(1, 20)))
            alive.add(str(added))
            added += 1
        if alive and rng.random() < 0.1:
            victim = rng.choice(sorted(alive))
            scheduler.abort(victim)
            alive.discard(victim)
        for s in run_step(scheduler):
            if s.sequence.slot == -1 and s.step.sample and s.sequence not in scheduler.waiting:
                finished.add(s.sequence.request.id)
    for _ in range(3000):
        if not scheduler.has_work:
            break
        run_step(scheduler)
    assert not scheduler.has_work, "a request starved"
    assert all(pool.num_free == pool.num_blocks - 1 for pool in scheduler.pools)
    assert finished
