# pyright: basic
"""Ways to do the attention of whole prompts on this GPU: each checked against float32 first, then all of them timed.

python benchmarks/prefill_attention.py

A way is compiled and checked in a process of its own, so that one that does not compile, is wrong, hangs or takes its
process along is said and left out. "In a step" is the time between two products of the feed-forward block, which heat
the card as a step does.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from timing import seconds_in_graph

from mgtp.runtime.kernels.decode_attention import Softmax
from mgtp.runtime.kernels.prefill_attention import prefill_attention
from mgtp.runtime.kernels.prompt_attention import PromptTiling, prompt_attention

KV, GROUPS, DIM = 8, 4, 128  # Llama-3.1-8B
HEADS = KV * GROUPS
SOFTMAX = Softmax(DIM**-0.5)
CHECKED = ([512], [512] * 16, [8000], [1, 130, 777])
TIMED = ([512], [512] * 16, [2048] * 4, [8000])
PATIENCE = 40.0
"""Seconds that compiling and checking may take, for all ways together."""

WAYS: dict[str, tuple | PromptTiling] = {
    "through the block table": (128, 128, 8, 2),
    **{
        f"descriptors {t.queries}x{t.keys} {t.warps} warps {t.stages} stages": t
        for t in (
            PromptTiling(128, 128, 8, 2), PromptTiling(128, 128, 8, 3), PromptTiling(128, 64, 8, 2),
            PromptTiling(128, 64, 8, 3), PromptTiling(128, 64, 8, 4), PromptTiling(64, 128, 4, 2),
            PromptTiling(64, 64, 4, 2), PromptTiling(64, 64, 4, 3),
        )
    },
}  # fmt: skip


class Prompts:
    """Whole prompts of `lengths` tokens: projected and rotated, and their keys and values in a blocked cache as well."""

    def __init__(self, lengths: list[int], size: int = 16) -> None:
        torch.manual_seed(len(lengths))
        self.lengths, self.longest = lengths, max(lengths)
        self.qkv = torch.randn(sum(lengths), (HEADS + 2 * KV) * DIM, dtype=torch.bfloat16, device="cuda")
        self.q, self.k, self.v = self.qkv.unflatten(1, (-1, DIM)).split([HEADS, KV, KV], dim=1)
        self.rotated = self.qkv.unflatten(1, (-1, DIM))[:, : HEADS + KV].contiguous()
        self.queries = self.q.contiguous()
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self.starts = torch.tensor(ends, dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.rows = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
        blocks = -(-self.longest // size)
        order = torch.randperm(len(lengths) * blocks, device="cuda") + 1
        self.table = order.to(torch.int32).view(len(lengths), blocks)
        shape = (order.numel() + 1, size, KV, DIM)
        self.cache = self.qkv.new_zeros(shape), self.qkv.new_zeros(shape)
        at = torch.cat([self._slots(s, n, size) for s, n in enumerate(lengths)])
        for cache, new in zip(self.cache, (self.k, self.v), strict=True):
            cache.view(-1, KV, DIM)[at] = new

    def _slots(self, sequence: int, length: int, size: int) -> torch.Tensor:
        tokens = torch.arange(length, device="cuda")
        return self.table[sequence].long()[tokens // size] * size + tokens % size

    def attend(self, way: tuple | PromptTiling) -> torch.Tensor:
        if isinstance(way, PromptTiling):
            return prompt_attention(self.rotated, self.qkv, KV, self.starts, self.longest, SOFTMAX, way)
        where = (self.cache, self.table, self.rows, self.starts, self.lens, self.longest, SOFTMAX)
        return prefill_attention(self.queries, *where, tiling=way)

    def error(self, out: torch.Tensor) -> float:
        """The largest relative error of any token's head against float32."""
        worst, begin = [], 0
        out = out.unflatten(1, (HEADS, DIM))
        for n in self.lengths:
            causal = torch.ones(n, n, dtype=torch.bool, device="cuda").tril()
            at = slice(begin, begin + n)
            for head in range(KV):
                queries = slice(head * GROUPS, (head + 1) * GROUPS)
                q, mine = (x[at, queries].float().transpose(0, 1) for x in (self.q, out))
                k, v = (x[at, head].float() for x in (self.k, self.v))
                scores = (q @ k.T * SOFTMAX.scale).masked_fill(~causal, float("-inf"))
                expected = scores.softmax(-1) @ v
                far = (mine - expected).norm(dim=-1) / expected.norm(dim=-1)
                worst.append(far.nan_to_num(9.0).max())
            begin += n
        return torch.stack(worst).max().item()

    @property
    def flops(self) -> float:
        return 4 * HEADS * DIM * sum(n * n / 2 for n in self.lengths)


def check(way: tuple | PromptTiling, answer: multiprocessing.Queue) -> None:
    """In a process of its own: the largest error, or what went wrong."""
    try:
        torch.cuda.set_per_process_memory_fraction(0.06)
        worst = 0.0
        for lengths in CHECKED:
            prompts = Prompts(lengths)
            prompts.attend(way)
            worst = max(worst, prompts.error(prompts.attend(way)))  # the second launch goes the short way
        answer.put(worst)
    except Exception as error:
        answer.put(f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:100]}")


def checked() -> dict[str, float]:
    """The ways that are right, and their largest errors. Says what becomes of the others."""
    context = multiprocessing.get_context("fork")
    queues = {name: context.Queue() for name in WAYS}
    processes = {name: context.Process(target=check, args=(WAYS[name], queues[name]), daemon=True) for name in WAYS}
    for process in processes.values():
        process.start()
    end, right = time.monotonic() + PATIENCE, {}
    for name, process in processes.items():
        process.join(max(0.0, end - time.monotonic()))
        found = "no answer in time" if process.is_alive() else f"exit code {process.exitcode}"
        if not queues[name].empty():
            found = queues[name].get()
        process.kill()
        if isinstance(found, float) and found < 0.03:
            right[name] = found
        else:
            print(f"left out: {name}: {found}", flush=True)
    return right


def in_a_step(call: Callable[[], object]) -> float:
    """Seconds of `call` between products, on a card that is warm."""
    x = torch.randn(8000, 4096, dtype=torch.bfloat16, device="cuda")
    weights = [torch.randn(28672, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    products: list[Callable[[], object]] = [partial(F.linear, x, weight) for weight in weights]
    alone = seconds_in_graph(products, 4) * 2
    return seconds_in_graph([products[0], call, products[1]], 4) * 3 - alone


def main() -> None:
    begin = time.monotonic()
    errors = checked()
    print(f"{torch.cuda.get_device_name()}, checked after {time.monotonic() - begin:.0f} s")
    prompts = [Prompts(lengths) for lengths in TIMED]
    shapes = [f"{len(p.lengths)}x{p.longest}" for p in prompts]
    print(f"{'microseconds':44}", *(f"{shape:>8}" for shape in shapes), " TFLOP/s  in a step  largest error")
    for name, error in errors.items():
        try:
            times = [seconds_in_graph([partial(p.attend, WAYS[name])], 4) for p in prompts]
            long = partial(prompts[-1].attend, WAYS[name])
            tera = prompts[-1].flops / times[-1] / 1e12
            columns = " ".join(f"{t * 1e6:8.0f}" for t in times)
            print(f"{name:44} {columns}  {tera:7.0f}  {in_a_step(long) * 1e6:9.0f}  {error:.4f}", flush=True)
        except Exception as failure:
            print(f"{name}: {str(failure)[:100]}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
