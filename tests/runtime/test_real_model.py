"""SmolLM2-135M-Instruct (9 query and 3 kv heads) at every kind of tp size gives exactly transformers' greedy ids."""

from __future__ import annotations

import pytest

from tests.rank_jobs import greedy
from tests.reference import load_reference, reference_greedy

COMPLETION = "The three laws of thermodynamics say that"
CHAT = "What is the capital of France? Answer in one sentence."
NEW_TOKENS = 32

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def expected(smollm2) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy ids) of transformers, with its own tokenizer and chat template, for both prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    messages = [{"role": "user", "content": CHAT}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompts = [tokenizer(COMPLETION).input_ids, tokenizer(chat, add_special_tokens=False).input_ids]
    model = load_reference(str(smollm2.parent), gguf_file=smollm2.name)
    return [(prompt, reference_greedy(model, prompt, NEW_TOKENS)) for prompt in prompts]


def test_prompts_are_tokenised_as_transformers_does(smollm2, expected, sharded):
    from pathlib import Path

    from mgtp.runtime.text.chat import ChatTemplate
    from mgtp.runtime.text.tokenizer import Tokenizer
    from mgtp.shardplan.shard_set import ShardSet

    shard_set = ShardSet.open(Path(sharded(smollm2, 2)))
    tokenizer = Tokenizer.load(shard_set.path, shard_set.config)
    assert tokenizer.encode(COMPLETION) == expected[0][0]
    text = ChatTemplate.load(shard_set.path).render([{"role": "user", "content": CHAT}])
    assert tokenizer.encode(text, add_special_tokens=False) == expected[1][0]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 9])
def test_greedy_ids_equal_transformers(tp_size, world, smollm2, expected, sharded):
    shard_set = sharded(smollm2, tp_size)
    for prompt, ids in expected:
        assert world.run(tp_size, greedy, shard_set, prompt, NEW_TOKENS)[0] == ids
