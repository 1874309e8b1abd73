"""Context parallelism on GPUs: the ids of one rank and of the reference, over NCCL and where ranks share a GPU.

Guards against index tensors on the wrong device, keys that the kernel sees at the wrong place, and attention that takes
memory for every pair of tokens.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

from mgtp.shardplan.families import parse_config
from mgtp.shardplan.fit import StepSize, workspace_bytes
from mgtp.shardplan.partition import model_axes
from tests.cuda.context_jobs import COUNT, answers, long_prompt
from tests.processes import mgtp
from tests.reference import load_reference, recipe_prompt, reference_greedy

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")]

PLACES = [
    pytest.param(1, [0, 0], id="1x2 on a GPU"),
    pytest.param(2, [0, 0], id="2x1 on a GPU"),
    pytest.param(2, [0, 0, 0, 0], id="2x2 on a GPU"),
    pytest.param(1, [0, 1], id="1x2 on 2 GPUs"),
    pytest.param(2, [0, 1], id="2x1 on 2 GPUs"),
]
PROMPTS = [recipe_prompt(n, seed=n) for n in (1, 3, 37, 90)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 4096,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 512,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(("tp_size", "devices"), PLACES)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])  # plain; windows and sinks
def test_ids_are_those_of_one_rank_and_of_the_reference(family, tp_size, devices, worlds, recipe_checkpoint, sharded):
    if max(devices) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    folder, world = recipe_checkpoint(family), worlds[len(devices)]
    want = [reference_greedy(load_reference(str(folder)), prompt, COUNT) for prompt in PROMPTS]
    for most in (256, 24):  # every prompt in one piece; long ones in several, beside others that decode
        one, _ = worlds[2].run_group(1, answers, [0], 1, sharded(folder, 1), PROMPTS, most)[0]
        assert one == want
        found, backend = world.run_group(
            len(devices), answers, devices, tp_size, sharded(folder, tp_size), PROMPTS, most
        )[0]
        assert found == want
    shared = len(set(devices)) < len(devices)
    assert backend in (("none",) if tp_size == len(devices) else ("host",) if shared else ("nccl", "oneshot"))


def test_recurrent_states_are_passed_on(worlds, recipe_checkpoint, sharded):
    folder = recipe_checkpoint("qwen3_5")
    want = [reference_greedy(load_reference(str(folder)), prompt, COUNT) for prompt in PROMPTS]
    for devices in ([0, 0], [0, 1])[: torch.cuda.device_count()]:
        assert worlds[2].run_group(2, answers, devices, 1, sharded(folder, 1), PROMPTS, 24)[0][0] == want


@pytest.mark.parametrize("devices", [pytest.param([0, 0], id="on a GPU"), pytest.param([0, 1], id="on 2 GPUs")])
def test_a_long_prompt_takes_little_memory(devices, worlds, tmp_path):
    """32,768 tokens in one step: the scores of all pairs would be 32 heads x 16,384 x 32,768 x 4 bytes, 64 GiB."""
    if max(devices) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    model, step = parse_config(CONFIG), StepSize(32768, 1, 2, 32768)
    planned = workspace_bytes(model, model_axes(model, [1]), 0, 2, step)
    _, want = worlds[2].run_group(1, long_prompt, [0], str(config), 32768)[0]
    for most, logits in worlds[2].run_group(2, long_prompt, devices, str(config), 32768):
        print(f"{most / 2**20:.0f} of {planned / 2**20:.0f} MiB, logits {(logits - want).abs().max():.4f} apart")
        assert most < 2 << 30
        assert most < planned
        assert (logits - want).abs().max() < 0.05 * want.std()


def test_a_rank_keeps_its_part_of_the_cache(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    shared = ("--cp-size", "2", "--allow-shared-device", "--devices", "0", "--device", "cuda")
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as name:
        probe = ("probe-memory", str(config), "--dummy-weights", "--max-model-len", "8192", "--json", *shared)
        report = json.loads(mgtp(Path(name), *probe).out)
    assert (report["tp_size"], report["cp_size"], report["within_plan"]) == (1, 2, True)
    for rank in report["ranks"]:
        # Blocks of 2 x 16 tokens and a scratch block; keys and values of 8 heads of 128 numbers of 2 bytes.
        blocks = rank["kv_cache_tokens"] // 32 + 1
        assert rank["kv_cache_bytes"] == blocks * 16 * 2 * 8 * 128 * 2
