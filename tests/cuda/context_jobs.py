"""What the ranks of tests/cuda/test_context.py do."""

from __future__ import annotations

import os

import torch

from mgtp.runtime.communicator import Communicator, SingleRank
from mgtp.runtime.mesh import create_mesh
from mgtp.runtime.sampling_params import SamplingParams
from tests.rank_jobs import load_worker, prompt_step, run_requests
from tests.world import MeshRanks

COUNT = 8


def answers(
    world: Communicator, devices: list[int], tp_size: int, shard_set: str, prompts: list[list[int]], most: int
) -> tuple[list[list[int]], str]:
    """(greedy ids of all prompts at once, `most` tokens a step; the cp axis' backend), rank r on GPU devices[r]."""
    device = torch.device("cuda", devices[world.rank])
    torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(world.rank)
    shared = len(set(devices)) < len(devices)
    sizes = {"tp": tp_size, "cp": len(devices) // tp_size}
    mesh = create_mesh(sizes, device, allow_shared_device=shared) if len(devices) > 1 else None
    ranks = MeshRanks(world, mesh.tp, mesh.cp) if mesh is not None else SingleRank()
    sampling = [SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True) for _ in prompts]
    options = {"max_num_seqs": 4, "max_model_len": 256, "block_size": 4, "kv_cache_bytes": 32 << 20}
    found = run_requests(ranks, shard_set, prompts, sampling, devices=devices, max_batch_tokens=most, **options)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    backend = "none" if mesh is None else mesh.cp.backend
    if mesh is not None:
        mesh.close()
    return found or [], backend


def long_prompt(world: Communicator, devices: list[int], config: str, length: int) -> tuple[int, torch.Tensor]:
    """(most bytes taken beside weights and cache, logits of the last token) of one step with a long prompt, tp 1."""
    device = torch.device("cuda", devices[world.rank])
    torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(world.rank)
    sizes = {"tp": 1, "cp": len(devices)}
    mesh = create_mesh(sizes, device, allow_shared_device=True) if len(devices) > 1 else None
    ranks = MeshRanks(world, mesh.tp, mesh.cp) if mesh is not None else SingleRank()
    options = {"max_num_seqs": 1, "max_model_len": length, "max_batch_tokens": length, "kv_cache_bytes": 1 << 30}
    worker = load_worker(ranks, config, devices=devices, dummy_dtype="bfloat16", **options)
    prompt = [i % 500 + 3 for i in range(length)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = worker.runner.forward(prompt_step(worker, prompt, 0, length)).float().cpu()
    most = torch.cuda.max_memory_allocated() - before
    worker.runner.close()
    if mesh is not None:
        mesh.close()
    return most, logits
