"""Finds, one choice at a time, what makes the whole decode step fastest on this GPU: tilings and launch order in place.

A product that is fastest by itself need not be so between its neighbours.

python benchmarks/step_search.py 1 8 32 [--tp N]: for these batch sizes, of one of N ranks without its collectives
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable

import torch
from step_timing import CONTEXT, decode_step, make_runner
from timing import seconds

from mgtp.runtime import graphs
from mgtp.runtime.graphs import DecodeGraphs
from mgtp.runtime.kernels import activation, decode_attention, linear, norm
from mgtp.runtime.kernels.tilings import Tiling


def matrices(tp_size: int) -> dict[tuple[int, int], str]:
    """Rows and columns of a rank's weights, of gate_up those of each half."""
    return {
        (6144 // tp_size, 4096): "qkv",
        (4096, 4096 // tp_size): "o",
        (14336 // tp_size, 4096): "gate_up",
        (4096, 14336 // tp_size): "down",
        (128256 // tp_size, 4096): "head",
    }


ROWS = [
    Tiling(*t)
    for t in ((1, 2048, 4), (2, 2048, 4), (1, 1024, 2), (2, 1024, 4), (4, 1024, 4), (1, 4096, 8), (2, 1024, 2))
]
TILES = [None] + [
    Tiling(*t, splits=splits)
    for t, choices in {
        (64, 128, 4, 4): (1, 2, 4), (64, 128, 4, 6): (1, 2, 4), (64, 64, 4, 6): (1, 2, 4), (64, 256, 4, 3): (1, 2),
        (32, 128, 4, 5): (1, 2), (128, 64, 8, 4): (1, 2, 4), (128, 128, 8, 3): (1, 2),
    }.items()
    for splits in choices
]  # fmt: skip
KERNELS = {
    "rows": linear._row_kernel, "tiles": linear._tile_kernel, "norm": norm._kernel,
    "attention": decode_attention._kernel, "activation": activation._kernel,
}  # fmt: skip
TILINGS = ((32, (32, 4, 6)), (32, (64, 4, 4)), (16, (32, 4, 4)), (16, (64, 4, 2)), (8, (64, 4, 4)), (8, (32, 2, 4)), (4, (64, 4, 4)),
           (4, (32, 2, 4)), (2, (128, 8, 3)), (2, (64, 4, 4)), (2, (64, 4, 2)), (1, (64, 4, 4)), (1, (64, 4, 2)), (1, (32, 2, 4)))  # fmt: skip


choose, choose_tiling = linear.choose, decode_attention.choose_tiling


class Search:
    """Coordinate descent over named choices; `time` is the whole step's."""

    def __init__(self, runner, batch: int, tp_size: int) -> None:
        self.runner, self.batch, self.heads, self.matrices = runner, batch, 8 // tp_size, matrices(tp_size)
        self.tilings = {name: choose(batch, *matrix, 2, name == "gate_up") for matrix, name in self.matrices.items()}
        self.splits = choose_tiling(batch * self.heads, 128, 2, 132)
        linear.choose = lambda tokens, rows, columns, itemsize, gated: self.tilings[self.matrices[rows, columns]]
        decode_attention.choose_tiling = lambda *_: self.splits
        graphs.bucket_sizes = lambda most: [batch]

    def time(self) -> float:
        steps = self.runner.paged_steps
        steps.graphs = DecodeGraphs(steps.decode, steps.last_ids, steps.varying, steps.stores.rotary)
        self.runner.forward(decode_step(self.batch, CONTEXT))
        return seconds(steps.graphs._graphs[self.batch][0].replay, 15) * 1e3

    def improve(self, name: str, options: list, put: Callable, current) -> None:
        best, found = self.best, current
        shown = []
        for option in options:
            if option == current:
                continue
            put(option)
            try:
                took = self.time()
            except Exception as error:
                took = 99.0
                print("  failed", option, str(error)[:60])
            shown.append(f"{took:.3f}")
            if took < best - 0.004:
                best, found = took, option
        put(found)
        self.best = best
        print(f"  {name}: {found} -> {best:.3f} ms  (tried {' '.join(shown)})", flush=True)

    def run(self) -> None:
        self.best = self.time()
        print(f"batch {self.batch}: {self.best:.3f} ms")
        options = ROWS if self.batch == 1 else TILES
        for _ in range(2 if self.batch == 1 else 1):
            for name, kernel in KERNELS.items():
                if name != ("tiles" if self.batch == 1 else "rows"):
                    self.improve(
                        f"trigger of {name}", [0, 1, 2], lambda v, k=kernel: setattr(k, "trigger", v), kernel.trigger
                    )
            attention = [t for t in TILINGS if 64 <= t[0] * self.batch * self.heads <= 2048]
            self.improve("attention", attention, lambda v: setattr(self, "splits", v), self.splits)
            for name in self.matrices.values():
                usable = [t for t in options if t is None or name != "head" or t.splits == 1]
                self.improve(name, usable, lambda v, n=name: self.tilings.__setitem__(n, v), self.tilings[name])


def compile_one(job: tuple[int, tuple[int, int], bool, Tiling]) -> None:
    """Compile in a process of its own: the result is found on disk later."""
    tokens, (rows, columns), gated, tiling = job
    try:
        x, w = (torch.zeros(n, columns, dtype=torch.bfloat16, device="cuda") for n in (tokens, rows * (1 + gated)))
        linear.tile_products(x, w, None, tiling, "silu" if gated else "")
    except Exception:
        pass  # too large for the device: said when it is timed


def compile_all(batches: list[int], tp_size: int) -> None:
    """Compile every variant, before this process touches CUDA."""
    shapes = [(matrix, name == "gate_up") for matrix, name in matrices(tp_size).items()]
    jobs = [(n, *shape, t) for n in batches if n > 1 for shape in shapes for t in TILES if t is not None]
    with multiprocessing.get_context("fork").Pool(16) as pool:
        pool.map(compile_one, jobs, chunksize=1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", type=int, nargs="+")
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    compile_all(options.batches, options.tp)
    runner = make_runner(128, 128 * 50, options.tp)
    for batch in options.batches:
        Search(runner, batch, options.tp).run()


if __name__ == "__main__":
    main()
