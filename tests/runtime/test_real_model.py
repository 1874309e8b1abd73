"""Real models at every kind of tp size give exactly transformers' greedy ids.

SmolLM2-135M-Instruct has 9 query and 3 kv heads, Gemma 3 270M has 4 and 1. That the tensors and token ids which are read
from their GGUF files are transformers' own is tests/shardplan/test_gguf_real.py's to show; here transformers runs them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mgtp.runtime.sampling_params import SamplingParams
from tests.rank_jobs import run_requests
from tests.reference import reference_greedy

COMPLETION = "The three laws of thermodynamics say that"
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
NEW_TOKENS = 24
MODELS = {"smollm2": (1, 2, 3, 4, 9), "gemma3_270m": (1, 2, 4)}
MOST = {"smollm2": 4, "gemma3_270m": 2}
"""Ranks outside `make soak`."""

pytestmark = pytest.mark.real_model


def reference_model(folder: Path) -> Any:
    """transformers in float32, eager, on the tensors of a shard set of one rank."""
    import torch
    import transformers
    from safetensors.torch import load_file

    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, (config.architectures or [""])[0])
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tensors = load_file(folder / "rank-0-of-1.safetensors")
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("_pad.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def expected(request, sharded):
    """Per model: its checkpoint, and (prompt ids, transformers' greedy ids) of a completion and a chat prompt."""
    made: dict[str, tuple[Path, list[tuple[list[int], list[int]]]]] = {}

    def of(name: str) -> tuple[Path, list[tuple[list[int], list[int]]]]:
        if name not in made:
            from transformers import AutoTokenizer

            checkpoint = request.getfixturevalue(name)
            folder = Path(sharded(checkpoint, 1))
            tokenizer = AutoTokenizer.from_pretrained(folder)
            prompts = [tokenizer(COMPLETION).input_ids]
            if tokenizer.chat_template:  # Gemma's is a base model
                chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
                prompts.append(tokenizer(chat, add_special_tokens=False).input_ids)
            model = reference_model(folder)
            made[name] = checkpoint, [(prompt, reference_greedy(model, prompt, NEW_TOKENS)) for prompt in prompts]
        return made[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_tokenised_as_transformers_does(name, expected, sharded):
    from mgtp.runtime.text.chat import ChatTemplate
    from mgtp.runtime.text.tokenizer import Tokenizer
    from mgtp.shardplan.shard_set import ShardSet

    checkpoint, prompts = expected(name)
    shard_set = ShardSet.open(Path(sharded(checkpoint, 1)))
    tokenizer = Tokenizer.load(shard_set.path, shard_set.config)
    assert tokenizer.encode(COMPLETION) == prompts[0][0]
    template = ChatTemplate.load(shard_set.path)
    assert template.available == (name == "smollm2")
    if template.available:
        assert tokenizer.encode(template.render(CHAT), add_special_tokens=False) == prompts[1][0]


@pytest.mark.parametrize(
    ("name", "tp_size"),
    [
        pytest.param(name, tp, marks=[pytest.mark.soak] if tp > MOST[name] else [])  # nine ranks take half a minute
        for name, sizes in MODELS.items()
        for tp in sizes
    ],
)
def test_greedy_ids_equal_transformers(name, tp_size, world, expected, sharded):
    checkpoint, prompts = expected(name)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    given = [prompt for prompt, _ in prompts]
    shard_set = sharded(checkpoint, tp_size)
    one_by_one = partial(run_requests, max_num_seqs=1)
    found = world.run(tp_size, one_by_one, shard_set, given, [params] * len(given))[0]
    assert found == [ids for _, ids in prompts]
