"""Recurrent states: their size is what is counted, at any context length, and a slot forgets when told to."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgtp.runtime.capacity import CacheDemand, longest_context, plan_blocks
from mgtp.runtime.state_cache import StateCache
from mgtp.shardplan.errors import DeviceError
from mgtp.shardplan.families import parse_config
from mgtp.shardplan.partition import model_axes
from mgtp.shardplan.recurrent_state import state_bytes
from tests.reference import max_difference, recipe_prompt
from tests.thread_ranks import ThreadRanks

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 52,
    "intermediate_size": 77,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "max_position_embeddings": 4096,
}
DEMAND = CacheDemand(max_num_seqs=5, max_model_len=256, max_batch_tokens=64, block_size=16)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_what_is_counted_is_what_is_held(tp_size):
    model = parse_config(CONFIG)
    axes = model_axes(model, [1] * tp_size)
    for rank in range(tp_size):
        cache = StateCache(model, axes, rank, DEMAND.max_num_seqs + 1, torch.bfloat16, torch.device("cpu"))
        held = sum(t.nbytes for i in (0, 1, 2) for t in cache.layer(i))
        assert held == DEMAND.needs(model, axes, rank, itemsize=2).state_bytes(DEMAND.max_num_seqs)


def test_size_of_one_sequence_by_hand():
    """Three delta nets: 3 past inputs of 2*3*12 + 6*20 channels in 2 bytes, and 6 states of 12 x 20 in 4 bytes."""
    model = parse_config(CONFIG)
    assert state_bytes(model, model_axes(model, [1]), 0, itemsize=2) == 3 * (3 * 192 * 2 + 6 * 12 * 20 * 4)


def test_states_are_taken_from_the_budget_of_the_cache():
    model = parse_config(CONFIG)
    axes = model_axes(model, [1])
    states = DEMAND.needs(model, axes, 0, itemsize=4).state_bytes(DEMAND.max_num_seqs)
    with pytest.raises(DeviceError, match="of recurrent states of 5 sequences, there are"):
        plan_blocks(model, axes, 0, DEMAND, states - 1, itemsize=4)
    block = 2 * 3 * 24 * 16 * 4
    assert plan_blocks(model, axes, 0, DEMAND, states + 17 * block, itemsize=4) == [17]
    assert longest_context(model, axes, 0, DEMAND, states + 5 * block, itemsize=4) == 4 * 16


def test_what_is_said_to_fit_fits():
    """Lowering --max-num-seqs to what was proposed left no room for a sequence's keys and values."""
    model = parse_config(CONFIG)
    axes, chance, options = model_axes(model, [1]), random.Random(0), Counter()
    names = {"max-num-seqs": "max_num_seqs", "max-model-len": "max_model_len", "block-size": "block_size"}
    for _ in range(400):
        sizes = chance.choice((1, 2, 40)), chance.randint(1, 4096), 64, chance.choice((1, 16, 256))
        demand, budget = CacheDemand(*sizes), int(2 ** chance.uniform(12, 23))
        try:
            plan_blocks(model, axes, 0, demand, budget, itemsize=4)
            continue
        except DeviceError as error:
            hint = error.hint
        if lowered := re.search(r"lower --([a-z-]+) to (\d+)", hint):
            options[lowered[1]] += 1
            smaller = replace(demand, **{names[lowered[1]]: int(lowered[2])})
            plan_blocks(model, axes, 0, smaller, budget, itemsize=4)
        asked = re.search(r"give (\d+) bytes", hint)
        assert asked is not None
        plan_blocks(model, axes, 0, demand, int(asked[1]), itemsize=4)
    assert options.keys() == names.keys(), "each way out is tried"


def test_only_the_slots_that_begin_are_cleared():
    model = parse_config(CONFIG)
    cache = StateCache(model, model_axes(model, [1]), 0, 4, torch.float32, torch.device("cpu"))
    for tensor in cache.layer(2):
        tensor.fill_(1)
    cache.clear([0, 2])
    assert all(t.flatten(1).amax(1).tolist() == [0, 1, 0, 1] for t in cache.layer(2))
    cache.clear([])
    assert all(t.flatten(1).amax(1).tolist() == [0, 1, 0, 1] for t in cache.layer(2))


def test_sequences_in_one_step_do_not_mix(recipe_checkpoint):
    """New prompts, chunks of prompts and single tokens of different slots in one step, in any order."""
    from mgtp.runtime.messages import Step

    folder: Path = recipe_checkpoint("qwen3_5")
    prompts = [recipe_prompt(20, seed=seed) for seed in range(4)]
    ranks = ThreadRanks(folder, 2)
    alone = [ranks.full(prompt, slot=3) for prompt in prompts]
    steps = [
        ((0, 0, 12), (1, 0, 19)),
        ((2, 0, 5), (1, 19, 20), (0, 12, 13)),
        ((0, 13, 14), (2, 5, 20), (3, 0, 1)),
        ((3, 1, 2), (0, 14, 20)),
        ((3, 2, 20),),
    ]
    rows: dict[int, list[torch.Tensor]] = {slot: [] for slot in range(4)}
    for parts in steps:
        step = Step([ranks.part(prompts[slot], a, b, slot) for slot, a, b in parts])
        logits = ranks.run(lambda runner, step=step: runner.forward(step, all_logits=True))
        for (slot, _, _), part in zip(parts, logits.split([b - a for _, a, b in parts]), strict=True):
            rows[slot].append(part)
    for slot, expected in enumerate(alone):
        assert max_difference(torch.cat(rows[slot]), expected) < 1e-4
