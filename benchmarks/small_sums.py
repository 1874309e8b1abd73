# pyright: basic
"""Times small sums over the GPUs of this machine: NCCL, oneshot, and what follows a sum in a layer, apart and in one kernel;
and what comes before it, a product of half as many columns as it has rows, that hands over its part or sends it itself.

torchrun --nproc-per-node 2 benchmarks/small_sums.py
"""

from __future__ import annotations

import os

import torch

from mgtp.runtime.collectives.oneshot import OneShotCommunicator
from mgtp.runtime.collectives.timing import seconds_per_call
from mgtp.runtime.kernels.all_reduce import all_reduce_add_rms_norm
from mgtp.runtime.kernels.linear import linear
from mgtp.runtime.kernels.norm import add_rms_norm
from mgtp.runtime.mesh import create_mesh

SHAPES = [(tokens, hidden) for hidden in (4096, 8192) for tokens in (1, 8, 32, 128)]
CALLS = 40  # in a graph


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    mesh = create_mesh({"tp": int(os.environ["WORLD_SIZE"])}, device, backends={"tp": "oneshot"})
    c = mesh.tp
    assert isinstance(c, OneShotCommunicator)
    for shape in SHAPES:
        x, residual = (torch.randn(shape, device=device).bfloat16() * 0.01 for _ in range(2))
        if c.method(x) != "one-shot":
            continue
        weight = torch.ones(shape[1], dtype=torch.bfloat16, device=device)
        parts = torch.randn(shape[0], shape[1] // 2, device=device).bfloat16()
        matrix = torch.randn(shape[1], shape[1] // 2, device=device).bfloat16()

        def handed(x=parts, w=matrix, r=residual, g=weight) -> None:
            c.all_reduce_add_rms_norm(linear(x, w), r, g, 1e-5, False, True)

        def sent(x=parts, w=matrix, r=residual, g=weight) -> None:
            part = x.new_empty((len(x), 0)) if c.send_product(x, w) else linear(x, w)
            c.all_reduce_add_rms_norm(part, r, g, 1e-5, False, True)

        ways = {
            "nccl": lambda x=x: c.fallback.all_reduce(x),
            "oneshot": lambda x=x: c.all_reduce(x),
            "norm": lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-5),
            "in one": lambda x=x, r=residual, w=weight: all_reduce_add_rms_norm(x, r, w, 1e-5, c.memory.kernels),
            "product": lambda x=parts, w=matrix: linear(x, w),
            "product, sum and norm": handed,  # in one or apart, as start-up found to be faster
            "product that sends": sent,
        }
        times = {name: seconds_per_call(way, c, device, CALLS) * 1e6 for name, way in ways.items()}
        if c.rank == 0:
            print(shape, ", ".join(f"{name} {time:.2f} us" for name, time in times.items()), flush=True)
    mesh.close()


if __name__ == "__main__":
    main()
