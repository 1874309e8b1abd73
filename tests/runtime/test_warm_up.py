"""The step that a device is warmed up with: as large as steps get, and without a trace in anyone's cache."""

from __future__ import annotations

import pytest
import torch

from tests.rank_jobs import load_worker, prompt_step

PROMPT = list(range(20, 31))


def before_and_after(ranks, shard_set: str, options: dict) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(tokens of the step, logits of a prompt's end, and those of its next token after the step)."""
    worker = load_worker(ranks, shard_set, **options)
    undisturbed = load_worker(ranks, shard_set, **options)
    steps = [prompt_step(worker, PROMPT, a, b, len(PROMPT)) for a, b in ((0, 10), (10, 11))]
    expected = [undisturbed.runner.forward(step).clone() for step in steps][1]
    worker.runner.forward(steps[0])
    largest = worker.largest_step()
    logits = worker.runner.forward(largest)
    assert len(logits) == len(largest.sequences)
    worker.runner.forward(worker.scratch_step(1, 39, start=1))
    return sum(s.num_tokens for s in largest.sequences), expected, worker.runner.forward(steps[1]).clone()


@pytest.mark.parametrize(
    ("name", "tp_size", "cp_size"), [("qwen3", 1, 1), ("qwen3", 1, 2), ("gemma3", 2, 1), ("qwen3_5", 1, 2)]
)
def test_the_largest_step_disturbs_no_one(world, recipe_checkpoint, sharded, name, tp_size, cp_size):
    options = {"max_num_seqs": 3, "max_batch_tokens": 96, "max_model_len": 40, "block_size": 4}
    shard_set = sharded(recipe_checkpoint(name), tp_size)
    for tokens, expected, found in world.run_mesh(tp_size, cp_size, before_and_after, shard_set, options):
        assert tokens == 1 + 2 * 40
        assert torch.equal(expected, found)
