"""Random weights are one model, whatever the number of ranks and the dtype: else runs could not be compared."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch

from mgtp.runtime.dummy import dummy_shard_set, random_block
from mgtp.runtime.weights import TORCH_DTYPE
from mgtp.shardplan.dtypes import COMMON_NAME
from tests.processes import mgtp, mgtp_here

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 16,
    "num_key_value_heads": 3, "vocab_size": 259, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **BASE}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **BASE, "pad_token_id": 0}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **BASE, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """A function that writes a config and gives its path."""

    def write(content: dict) -> Path:
        path = tmp_path / "model.json"
        path.write_text(json.dumps(content))
        return path

    return write


def whole_tensors(path: Path, tp_size: int, dtype: str = "auto") -> dict[str, torch.Tensor]:
    """Every tensor of the model, put together from what the ranks hold."""
    found: dict[str, torch.Tensor] = {}
    for rank in dummy_shard_set(path, tp_size, dtype).plan.ranks:
        block = random_block(rank, torch.device("cpu"))
        for t in rank.tensors:
            if t.source is None:
                continue
            part = block[t.offset : t.offset + t.bytes].view(TORCH_DTYPE[COMMON_NAME[t.dtype]]).view(t.shape)
            whole = found.setdefault(t.name, torch.full(t.source.shape, torch.nan, dtype=part.dtype))
            if t.source.dim is None:
                whole.copy_(part)
                continue
            places = torch.cat([torch.arange(*r) for r in t.source.ranges])
            whole.index_copy_(t.source.dim, places, part)
    return found


@pytest.mark.parametrize("content", [LLAMA, PHI3, QWEN3_MOE], ids=lambda content: content["model_type"])
def test_the_parts_of_any_ranks_are_one_model(content, config):
    path = config(content)
    one, three = whole_tensors(path, 1), whole_tensors(path, 3)
    assert one.keys() == three.keys() and len(one) > 10
    for name, tensor in one.items():
        assert torch.equal(tensor, three[name]), name


def test_every_dtype_holds_the_same_numbers(config):
    path = config(LLAMA)
    exact = whole_tensors(path, 1, "float64")
    for dtype in ("bfloat16", "float16", "float32"):
        for name, tensor in whole_tensors(path, 1, dtype).items():
            assert torch.equal(tensor.double(), exact[name]), (dtype, name)


def test_weights_are_spread_like_those_of_a_new_model(config):
    tensors = {n: t for n, t in whole_tensors(config(LLAMA), 1, "float32").items() if t.dim() == 2}
    for name, t in tensors.items():
        assert abs(t.mean()) < 5 * 0.018 / prod(t.shape) ** 0.5, name
        assert 0.016 < t.std() < 0.020 and t.abs().max() < 0.032, name
        # No row is like the next, no column either.
        assert abs((t[1:] * t[:-1]).mean()) < 1e-4 and abs((t[:, 1:] * t[:, :-1]).mean()) < 1e-4, name
    first = tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    assert abs((first[0] * first[1]).mean()) < 1e-4


def test_commands_run_a_config_alone(config, tmp_path):
    path = str(config(LLAMA))
    generate = ("generate", path, "--dummy-weights", "--dtype", "float32", "--device", "cpu", "--json")
    generate += ("--prompt-ids", "3,4,5,6", "--max-tokens", "12", "--temperature", "0", "--ignore-eos")
    ids = [json.loads(mgtp(tmp_path, *generate, "--tp-size", n).out)["token_ids"] for n in ("1", "2")]
    assert ids[0] == ids[1] and len(ids[0]) == 12
    probe = ("probe-memory", path, "--dummy-weights", "--tp-size", "2", "--device", "cpu", "--json")
    report = json.loads(mgtp(tmp_path, *probe).out)
    assert report["within_plan"] and len(report["ranks"]) == 2
    plan = json.loads(mgtp_here("plan", path, "--dummy-weights", "--tp-size", "2", "--json").out)
    assert plan["total_weight_bytes"] == sum(r["weight_bytes"] for r in plan["ranks"]) and plan["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--verify-on-load",), "--verify-on-load does not go with --dummy-weights"),
        (("--revision", "main"), "--revision does not go with --dummy-weights"),
        (("--prompt", "hello"), "no tokenizer.json"),
    ],
)
def test_what_needs_a_checkpoint_is_refused(extra, said, config):
    ids = () if "--prompt" in extra else ("--prompt-ids", "3")
    arguments = ("generate", str(config(LLAMA)), "--dummy-weights", "--device", "cpu", *ids, *extra)
    assert said in mgtp_here(*arguments, code=2).err
