"""The oneshot kernels with two ranks that share a GPU, for compute-sanitizer (benchmarks/sanitize_collectives.sh)."""

from __future__ import annotations

import os

import torch

import tests.world
from mgtp.runtime.collectives.oneshot import OneShotCommunicator
from mgtp.runtime.communicator import Communicator
from tests.cuda.collective_jobs import HIDDEN, close, float32_sum, parts, sent_or_not, with_oneshot
from tests.world import World


def every_kernel(world: Communicator, devices: list[int]) -> None:
    """Sums of every dtype, rows that do not fill a block, more rows than programs; and the fused kernel's variants."""

    def job(c: OneShotCommunicator) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in ((1, HIDDEN), (3, 104), (80, HIDDEN)):
                tensors = parts(c, shape, dtype, 1)
                close(c.all_reduce(tensors[c.rank].clone()), float32_sum(tensors), 1)
        for tokens, weighted, one_plus in ((1, True, False), (7, False, False), (80, True, True)):
            tensors = parts(c, (tokens, HIDDEN), torch.bfloat16, tokens)
            weight = tensors[0][0].contiguous() if weighted else None
            total = c.all_reduce_add_rms_norm(tensors[c.rank], tensors[0], weight, 1e-5, one_plus, True)[1]
            close(total, float32_sum([*tensors, tensors[0]]), 2)
            products = [x @ x.new_ones(256, HIDDEN).T for x in tensors]
            nothing = torch.zeros_like(products[0])
            part = sent_or_not(c, tensors[c.rank], tensors[0].new_ones(256, HIDDEN))
            total = c.all_reduce_add_rms_norm(part, nothing, None, 1e-5, one_plus, True)[1]
            close(total, float32_sum(products), 2 * c.size)

    with_oneshot(world, devices, job)


def main() -> None:
    """Run the job on two ranks; raises what a rank raised."""
    tests.world.JOB_SECONDS = int(os.environ.get("JOB_SECONDS", "240"))
    os.environ |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    world = World(2, spawn=True)
    try:
        world.run_group(2, every_kernel, [0, 0])
        world.end(60)
    finally:
        world.close()
    print("every sum was right")


if __name__ == "__main__":
    main()
