"""Steps that are launched before the last tokens were read give the same answers as steps that are not."""

from __future__ import annotations

from typing import Any

import pytest

from mgtp.runtime.messages import Request, Stop
from mgtp.runtime.sampling_params import SamplingParams
from tests.rank_jobs import load_worker


def answers(communicator, shard_set: str, requests: list[Request], overlap: bool, options: dict[str, Any]):
    """Every request's ids and finish reason, and how often a sequence was preempted; None on followers."""
    worker = load_worker(communicator, shard_set, **options)
    if communicator.rank > 0:
        worker.follow()
        return None
    engine = worker.make_engine()
    engine.overlap = overlap
    found: dict[str, tuple[list[int], list[str]]] = {r.id: ([], []) for r in requests}
    todo = list(requests)
    while engine.has_work or todo:
        if todo:
            engine.add(todo.pop(0))
        tokens, failures = engine.step()
        assert not failures, failures
        for token in tokens:
            found[token.id][0].append(token.token_id)
            found[token.id][1].extend([token.finish_reason] if token.finish_reason else [])
    worker.link.send_step(Stop())
    pools = engine.scheduler.pools
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools), "a block was not given back"
    return found, engine.scheduler.num_preemptions


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("scarce", [False, True])
def test_overlap_changes_no_answer(world, recipe_checkpoint, sharded, tp_size, scarce):
    """Guards against a sequence that goes on after its end, and one computed again without its newest token."""
    shard_set = sharded(recipe_checkpoint("qwen3"), tp_size)
    ends = list(range(20, 26))  # so many that some answers end by one of them
    sampling = [
        SamplingParams(temperature=t, max_tokens=30 + i, seed=i, ignore_eos=i == 5)
        for i, t in enumerate((0.0, 1.5, 1.5, 1.5, 0.0, 2.0))
    ]
    requests = [Request(str(i), list(range(10 + i, 20 + 3 * i)), each, ends) for i, each in enumerate(sampling)]
    options: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "max_model_len": 96}
    plain, _ = world.run(tp_size, answers, shard_set, requests, False, options)[0]
    if scarce:
        options["kv_cache_bytes"] = {1: 125_000, 2: 85_000}[tp_size]
    outcome, preemptions = world.run(tp_size, answers, shard_set, requests, True, options)[0]
    assert outcome == plain
    assert all(len(reasons) == 1 for _, reasons in outcome.values())
    assert {"stop", "length"} == {reason for _, reasons in outcome.values() for reason in reasons}
    assert not scarce or preemptions
