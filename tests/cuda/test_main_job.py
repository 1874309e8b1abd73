"""The main job on a GPU: bf16 as close to float32 as the reference's own bf16, ranks that share a device, one read a file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mgtp.runtime.launch.start import LaunchOptions, start_ranks
from mgtp.runtime.messages import Stop
from mgtp.shardplan.shard_set import ShardSet
from tests.processes import mgtp

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")]


@pytest.fixture
def short_folder():
    """A short path, for the Unix sockets of runs."""
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def medium(tmp_path_factory) -> Path:
    """A random Llama of 8 layers, hidden 1024, 16 query and 4 kv heads, in float32.

    Its embedding is large and tied, so that some tokens win by a margin that bf16 cannot blur.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4099, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=4096, initializer_range=0.02, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
        model.model.embed_tokens.weight.normal_(0, 0.5)
    folder = tmp_path_factory.mktemp("medium") / "model"
    model.save_pretrained(folder)
    return folder


def rank_logits(shard_set: str, prompt: list[int]) -> torch.Tensor:
    """[T, V] of a single rank on the GPU, in this process."""
    from mgtp.runtime.communicator import SingleRank
    from mgtp.runtime.options import RankOptions
    from mgtp.runtime.place import Place
    from mgtp.runtime.rank_worker import RankWorker
    from tests.rank_jobs import GroupLink, prompt_step

    worker = RankWorker(GroupLink(SingleRank(), RankOptions(shard_set, 1, "cuda", [0], max_model_len=2048)))  # type: ignore[arg-type]
    worker.place = Place(torch.device("cuda", 0), SingleRank())
    worker.load()
    worker.allocate()
    return worker.runner.forward(prompt_step(worker, prompt, 0, len(prompt)), all_logits=True).float().cpu()


def test_bf16_is_as_close_to_float32_as_the_reference(medium, sharded):
    import transformers

    prompt = torch.randint(3, 4099, (300,), generator=torch.Generator().manual_seed(1)).tolist()

    def reference(dtype: torch.dtype) -> torch.Tensor:
        cls: Any = transformers.LlamaForCausalLM
        model = cls.from_pretrained(medium, dtype=dtype, attn_implementation="eager").cuda().eval()
        with torch.no_grad():
            return model(input_ids=torch.tensor([prompt]).cuda(), use_cache=False).logits[0].float().cpu()

    exact, rounded = reference(torch.float32), reference(torch.bfloat16)
    ours = rank_logits(sharded(medium, 1, "bfloat16"), prompt)
    allowed = (rounded - exact).abs().max().item()
    difference = (ours - exact).abs().max().item()
    print(f"bf16 against float32: ours {difference:.4f}, transformers {allowed:.4f}")
    assert difference <= 2 * allowed
    top = exact.topk(2).values
    clear = top[:, 0] - top[:, 1] > 4 * allowed
    assert clear.any()
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])


def test_ranks_that_share_a_device_agree_with_one(short_folder, medium, sharded):
    prompt = ",".join(map(str, range(10, 60)))
    options = ("--temperature", "0", "--max-tokens", "48", "--ignore-eos", "--json", "--device", "cuda")
    outputs = []
    for tp_size, extra in ((1, ()), (2, ("--allow-shared-device", "--devices", "0"))):
        shard_set = sharded(medium, tp_size)
        run = mgtp(short_folder, "generate", shard_set, "--prompt-ids", prompt, *options, *extra)
        outputs.append(json.loads(run.out)["token_ids"])
        assert "detected" in run.err
    assert outputs[0] == outputs[1]


def test_context_ranks_that_share_a_device_agree_with_one(short_folder, medium, sharded):
    """In float32: with cp, attention is made of other operations, whose rounding is not that of the kernels."""
    prompt = ",".join(map(str, range(10, 60)))
    options = ("--temperature", "0", "--max-tokens", "48", "--ignore-eos", "--json", "--device", "cuda")
    outputs = []
    for tp_size, cp_size in ((1, 1), (1, 2), (2, 2)):
        cp = ("--cp-size", str(cp_size), "--allow-shared-device", "--devices", "0")
        run = mgtp(short_folder, "generate", sharded(medium, tp_size, "float32"), "--prompt-ids", prompt, *options, *cp)
        outputs.append(json.loads(run.out)["token_ids"])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_over_nccl_agree_with_one(short_folder, medium, sharded):
    prompt = ",".join(map(str, range(10, 60)))
    options = ("--temperature", "0", "--max-tokens", "48", "--ignore-eos", "--json", "--device", "cuda")
    finished = [mgtp(short_folder, "generate", sharded(medium, n), "--prompt-ids", prompt, *options) for n in (1, 2)]
    assert not any("does not end by itself" in run.err for run in finished), finished[1].err
    runs = [json.loads(run.out) for run in finished]
    assert runs[0]["token_ids"] == runs[1]["token_ids"]
    assert len({r["device"] for r in runs[1]["ranks"]}) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_leave_nccl_by_themselves(short_folder, medium, sharded):
    """A communicator cannot be destroyed while a graph lives that has recorded it."""
    started = start_ranks(ShardSet.open(Path(sharded(medium, 2))), LaunchOptions(device="cuda", max_model_len=256))
    try:
        started.group.send(Stop())
        started.group.end_by_themselves()
        assert all(rank.has_exited for rank in started.group.local)
    finally:
        started.group.stop()


def test_more_ranks_than_devices_is_refused_before_anything_starts(short_folder, medium, sharded):
    count = torch.cuda.device_count()
    shard_set = sharded(medium, count + 1)
    run = mgtp(short_folder, "generate", shard_set, "--prompt-ids", "5", "--device", "cuda", code=4)
    assert f"needs {count + 1} devices" in run.err and "--allow-shared-device" in run.err


@pytest.mark.parametrize("visible", ["", "0,0", "99"])
def test_odd_visible_devices_start_or_say_why(visible, short_folder, medium, sharded):
    arguments = ("generate", sharded(medium, 1), "--prompt-ids", "5", "--max-tokens", "2", "--device", "cuda")
    run = mgtp(short_folder, *arguments, code=None, CUDA_VISIBLE_DEVICES=visible)
    assert run.code == 0 or (run.code == 4 and len(run.err.strip().splitlines()) == 2), run.err


def test_the_device_is_found_by_its_uuid(short_folder, medium, sharded):
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    arguments = ("generate", sharded(medium, 1), "--prompt-ids", "5", "--max-tokens", "2", "--device", "cuda")
    assert "detected 1 GPU(s)" in mgtp(short_folder, *arguments, CUDA_VISIBLE_DEVICES=uuid).err


def test_loading_reads_the_file_once(medium, sharded):
    from mgtp.runtime.weights import read_to_device
    from mgtp.shardplan.shard_set import ShardSet

    shard_set = ShardSet.open(Path(sharded(medium, 2, "bfloat16")))
    plan = shard_set.plan.ranks[1]

    def bytes_read() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    torch.cuda.init()
    before = bytes_read()
    block = read_to_device(shard_set.rank_path(1), plan, torch.device("cuda", 0))
    assert bytes_read() - before <= 1.05 * plan.bytes
    assert block.cpu().numpy().tobytes() == shard_set.rank_path(1).read_bytes()[plan.data_offset :]


def test_probe_memory_measures_the_plan(short_folder, medium, sharded):
    run = mgtp(short_folder, "probe-memory", sharded(medium, 1, "bfloat16"), "--device", "cuda", "--json")
    rank = json.loads(run.out)["ranks"][0]
    # The allocator takes memory in pages of 20 MiB.
    off = abs(rank["weight_bytes"] - rank["planned_weight_bytes"])
    assert off <= max(0.05 * rank["planned_weight_bytes"], 20 << 20), rank
    assert rank["device_used_bytes"] < rank["device_total_bytes"] and os.path.basename(rank["file"]) == rank["file"]
