"""Context parallelism: every factoring of ranks into tp x cp gives the ids of one rank, for every family.

Guards against what sharing out a sequence brings: masks by the wrong positions, keys of other ranks missed or seen twice,
partial results merged with the wrong weights, sinks counted once a rank, windows that end inside another rank's blocks,
recurrent states that arrive out of order, and prefixes found on one rank alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mgtp.runtime.communicator import Communicator
from mgtp.runtime.messages import Request, Stop
from mgtp.runtime.sampling_params import SamplingParams
from tests.rank_jobs import chunked_logits, full_logits, load_worker
from tests.recipes import RECIPES
from tests.reference import assert_close, load_reference, recipe_prompt, reference_logits
from tests.world import MeshRanks

NAMES = [name for name in RECIPES if name != "deepseek_v3"]  # which no family reads
FACTORINGS = [(tp, cp) for n in range(2, 9) for cp in range(2, n + 1) if n % cp == 0 for tp in (n // cp,) if tp <= 6]
QUICK = {"llama": [(1, 2), (2, 2), (1, 3)], "gemma4_e": [(1, 2)], "gpt_oss": [(2, 2)], "qwen3_5": [(1, 3)]}
ALWAYS = [(1, 2)]
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 37, 90)  # below, at and above every cp size and window
PROMPTS = [recipe_prompt(n, seed=n) for n in LENGTHS]
COUNTS = [9, 3, 12, 4, 7, 5, 11, 6, 3, 8, 10]
RING = [(1, 2), (2, 2), (1, 3), (2, 4)]  # where keys go round the ring too
NOTHING_CACHED = ("qwen3_5", "qwen3_5_vl", "phi3")  # whose prefixes cannot be shared
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_batch_tokens": 24, "block_size": 4, "max_model_len": 128}


def answers(
    ranks: Communicator | MeshRanks, shard_set: str, prompts: list[list[int]], counts: list[int]
) -> tuple[list[list[int]], list[list[int]], int]:
    """Greedy ids of all prompts at once, then of each again, and how many prompt tokens were found in the cache."""
    worker = load_worker(ranks, shard_set, **OPTIONS)
    if ranks.rank > 0:
        worker.follow()
        return [], [], 0
    engine = worker.make_engine()

    def run(numbers: range) -> list[list[int]]:
        for i in numbers:
            params = SamplingParams(temperature=0.0, max_tokens=counts[i], ignore_eos=True)
            engine.add(Request(str(i), prompts[i], params, []))
        outputs: dict[str, list[int]] = {str(i): [] for i in numbers}
        while engine.scheduler.has_work:
            tokens, failures = engine.step()
            assert not failures, failures
            for token in tokens:
                outputs[token.id].append(token.token_id)
        return list(outputs.values())

    together = run(range(len(prompts)))
    again = [ids for i in range(len(prompts)) for ids in run(range(i, i + 1))]
    worker.link.send_step(Stop())
    return together, again, engine.scheduler.num_cached_tokens


def answers_by_ring(*args: Any) -> tuple[list[list[int]], list[list[int]], int]:
    """`answers`, keys of earlier tokens going round the ring however few they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mgtp.runtime.parallel.attention.GATHER_BYTES", 0)
        patch.setattr("mgtp.runtime.layers.context_attention.GATHER_BYTES", 0)  # decoding: one sequence at a time
        return answers(*args)


def factorings_of(name: str) -> list[Any]:
    """All of them, most in the long tests."""
    quick = QUICK.get(name, ALWAYS)
    return [pytest.param(name, *f, marks=() if f in quick else pytest.mark.soak) for f in FACTORINGS]


@pytest.fixture(scope="module")
def one_rank(world, recipe_checkpoint, sharded):
    """A function that gives the ids of a recipe on one rank."""

    @cache
    def ids(name: str) -> list[list[int]]:
        return world.run(1, answers, sharded(recipe_checkpoint(name), 1), PROMPTS, COUNTS)[0][0]

    return ids


@pytest.mark.parametrize(("name", "tp_size", "cp_size"), [case for name in NAMES for case in factorings_of(name)])
def test_ids_are_those_of_one_rank(name, tp_size, cp_size, one_rank, world, recipe_checkpoint, sharded):
    folder, want = recipe_checkpoint(name), one_rank(name)
    for job in (answers, answers_by_ring) if (tp_size, cp_size) in RING else (answers,):
        together, again, num_cached = world.run_mesh(tp_size, cp_size, job, sharded(folder, tp_size), PROMPTS, COUNTS)[
            0
        ]
        assert together == want
        assert again == want
        assert num_cached > 0 or name in NOTHING_CACHED


@pytest.mark.parametrize(("tp_size", "cp_size"), [(1, 2), (2, 3)])
def test_every_rank_has_the_logits_of_every_token(tp_size, cp_size, world, recipe_checkpoint, sharded):
    folder, prompt = recipe_checkpoint("qwen3"), recipe_prompt(37)
    want, shard_set = reference_logits(load_reference(str(folder)), prompt), sharded(folder, tp_size)
    for ours in world.run_mesh(tp_size, cp_size, full_logits, shard_set, prompt):
        assert_close(ours, want, 1e-4, "full")
    for ours in world.run_mesh(tp_size, cp_size, chunked_logits, shard_set, prompt, 10):
        assert_close(ours, want, 1e-4, "in chunks")
