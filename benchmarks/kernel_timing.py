# pyright: basic, reportArgumentType=false, reportOptionalIterable=false
"""Times the kernels on this GPU against torch's own, over tilings: what the choices in runtime/kernels were made by.

python benchmarks/kernel_timing.py [products] [decode] [prefill]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import copy_bandwidth, seconds_in_graph

from mgtp.runtime.kernels.decode_attention import Softmax, decode_attention
from mgtp.runtime.kernels.linear import row_products, tile_products
from mgtp.runtime.kernels.prefill_attention import prefill_attention
from mgtp.runtime.kernels.rotary import Rotation
from mgtp.runtime.kernels.tilings import Tiling

Job = Callable[[], object]

# Llama-3.1-8B on one rank: output rows, columns, activation.
MATRICES = {
    "qkv": (6144, 4096, ""),
    "o": (4096, 4096, ""),
    "gate_up": (28672, 4096, "silu"),
    "down": (4096, 14336, ""),
    "head": (128256, 4096, ""),
}
ONE_TOKEN = [Tiling(*t) for t in ((1, 2048, 4), (2, 2048, 4), (1, 1024, 2), (2, 1024, 4), (4, 1024, 4), (1, 4096, 8))]
MANY_TOKENS = [
    Tiling(*t, splits=splits)
    for t, choices in {
        (64, 128, 4, 4): (1, 2, 4, 8), (64, 128, 4, 6): (2, 4), (64, 256, 4, 3): (2, 4), (64, 64, 4, 8): (2, 4),
        (32, 128, 4, 5): (1, 2, 4), (32, 256, 4, 4): (1, 2), (16, 256, 4, 6): (1, 2), (64, 64, 4, 6): (1, 2, 4),
        (128, 64, 4, 6): (1, 2, 4, 8), (128, 128, 8, 3): (1, 2, 4), (128, 64, 8, 4): (1, 2, 4),
    }.items()
    for splits in choices
]  # fmt: skip


def product_job(name: str, tokens: int, tiling: Tiling | None, weight: torch.Tensor, x: torch.Tensor) -> Job:
    activation = MATRICES[name][2]
    if tiling is not None:
        kernel = row_products if tokens == 1 else tile_products
        return partial(kernel, x, weight, None, tiling, activation)
    return partial(F.linear, x, weight)


def weights(name: str, copies: int) -> list[torch.Tensor]:
    rows, columns, _ = MATRICES[name]
    return [torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(copies)]


def tilings(name: str, tokens: int) -> list[Tiling]:
    if tokens == 1:
        return ONE_TOKEN
    return [t for t in MANY_TOKENS if (tokens < 64 or t.rows >= 64) and (name != "head" or t.splits == 1)]


COUNTS = (1, 8, 32, 64, 128)
PREFILL_TILINGS = (
    (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 4), (64, 64, 4, 3),
    (64, 128, 4, 2), (64, 32, 4, 4), (128, 64, 4, 3),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32)
DECODE_TILINGS = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (32, 4, 4), (32, 4, 6), (32, 2, 4), (128, 8, 3))


def compile_all(products: bool, decode: bool) -> None:
    """Compile every variant in processes of their own, before this one touches CUDA."""
    jobs = [(name, n, t) for n in COUNTS for name in MATRICES for t in tilings(name, n)] if products else []
    variants = [(s, t) for s in SPLITS for t in DECODE_TILINGS] if decode else []
    with multiprocessing.get_context("fork").Pool(16) as pool:
        pending = [pool.apply_async(compile_product, job) for job in jobs]
        pending += [pool.apply_async(compile_decode, variant) for variant in variants]
        for each in pending:
            each.get()


def compile_decode(splits: int, tiling: tuple[int, int, int]) -> None:
    try:
        cache = Cache(1, 640, 1)
        cache.attend(torch.zeros(1, 6144, dtype=torch.bfloat16, device="cuda"), 0, splits, tiling)
    except Exception:
        pass


def compile_product(name: str, tokens: int, tiling: Tiling) -> None:
    """Compile in a process of its own: the result is found on disk later."""
    try:
        x = torch.zeros(tokens, MATRICES[name][1], dtype=torch.bfloat16, device="cuda")
        product_job(name, tokens, tiling, weights(name, 1)[0], x)()
    except Exception:
        pass  # too large for the device: said when it is timed


def time_products() -> None:
    counts = COUNTS
    chosen: dict[str, list[int]] = {}
    for name, (rows, columns, _) in MATRICES.items():
        size = rows * columns * 2
        copies = weights(name, max(2, min(8, (800 << 20) // size)))
        for tokens in counts:
            x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
            found = {}
            for tiling in (None, *tilings(name, tokens)):
                try:
                    time = seconds_in_graph([product_job(name, tokens, tiling, w, x) for w in copies], 4)
                except Exception as error:
                    found[tiling] = (9.0, str(error)[:40])
                    continue
                found[tiling] = (time, "")
            base = found.pop(None)[0]
            best = sorted(found.items(), key=lambda item: item[1][0])[:4]
            shown = "  ".join(f"{t.rows}x{t.columns}w{t.warps}s{t.stages}k{t.splits} {v[0] * 1e6:.1f}" for t, v in best)
            print(
                f"{name:8} T={tokens:<4} cublas {base * 1e6:7.1f} us {size / base / 1e12:.2f} TB/s | {shown}",
                flush=True,
            )
        del copies
    Path(os.environ.get("OUT", "."), "tilings.json").write_text(json.dumps(chosen))


class Cache:
    """Layers of a blocked cache with `sequences` of `context` tokens, of 8 kv heads of 128."""

    def __init__(self, sequences: int, context: int, layers: int, size: int = 16) -> None:
        per_sequence = -(-context // size)
        blocks = sequences * per_sequence + 1
        self.layers = [
            tuple(torch.randn(blocks, size, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            for _ in range(layers)
        ]
        order = torch.randperm(blocks - 1, device="cuda").to(torch.int32) + 1
        self.table = order.view(sequences, per_sequence)
        self.rows = torch.arange(sequences, dtype=torch.int32, device="cuda")
        self.positions = torch.full((sequences,), context - 1, dtype=torch.int32, device="cuda")
        self.counters = torch.zeros(sequences * 8, dtype=torch.int32, device="cuda")
        angles = torch.rand(context, 64, device="cuda")
        self.rotation = Rotation(torch.cat([angles.cos(), angles.sin()], dim=1))

    def attend(self, qkv: torch.Tensor, layer: int, splits: int, tiling: tuple[int, int, int]) -> torch.Tensor:
        where = (self.layers[layer], self.table, self.rows, self.positions, self.counters)
        return decode_attention(qkv, *where, Softmax(128**-0.5), self.rotation, splits=splits, tiling=tiling)


def time_decode() -> None:
    for sequences, context in ((1, 640), (1, 8192), (8, 640), (32, 640), (128, 640)):
        kv_bytes = sequences * context * 4096
        cache = Cache(sequences, context, max(2, min(16, (600 << 20) // kv_bytes)))
        qkv = torch.randn(sequences, 6144, dtype=torch.bfloat16, device="cuda")
        found = []
        for splits in (s for s in SPLITS if 64 <= s * sequences * 8 <= 2048):
            for tiling in DECODE_TILINGS:
                calls = [partial(cache.attend, qkv, i, splits, tiling) for i in range(len(cache.layers))]
                try:
                    found.append((seconds_in_graph(calls, 4), splits, tiling))
                except Exception as error:
                    print(splits, tiling, str(error)[:60])
        shown = "  ".join(f"x{s} {t} {v * 1e6:.1f}" for v, s, t in sorted(found)[:6])
        floor = kv_bytes / 4.3e12
        print(f"decode B={sequences} L={context}: floor {floor * 1e6:.1f} us | {shown}", flush=True)


def time_prefill() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    softmax = Softmax(128**-0.5)
    for sequences, context in ((1, 512), (16, 512), (1, 8000)):
        cache = Cache(sequences, context, 1)
        tokens = sequences * context
        q = torch.randn(tokens, 32, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(tokens, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        starts = torch.arange(0, tokens + 1, context, dtype=torch.int32, device="cuda")
        lens = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
        layer, lists = cache.layers[0], (cache.table, cache.rows, starts, lens, context, softmax)
        ways: dict[str, Job] = {
            f"ours {tiling}": partial(prefill_attention, q, layer, *lists, tiling=tiling) for tiling in PREFILL_TILINGS
        }

        def cudnn() -> torch.Tensor:
            heads = [t.view(sequences, context, -1, 128).transpose(1, 2) for t in (q, k, v)]
            heads = [heads[0], *(t.repeat_interleave(4, dim=1) for t in heads[1:])]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(*heads, is_causal=True)

        ways["cudnn"] = cudnn
        flops = 4 * sequences * context * context / 2 * 4096
        for name, call in ways.items():
            try:
                time = seconds_in_graph([call], 8)
                print(
                    f"prefill {sequences}x{context} {name}: {time * 1e6:.0f} us {flops / time / 1e12:.0f} TFLOP/s",
                    flush=True,
                )
            except Exception as error:
                print(f"prefill {name}: {str(error)[:100]}")


def main() -> None:
    wanted = sys.argv[1:] or ["products", "decode", "prefill"]
    compile_all("products" in wanted, "decode" in wanted)
    print(f"copy {copy_bandwidth() / 1e12:.2f} TB/s")
    if "products" in wanted:
        time_products()
    if "decode" in wanted:
        time_decode()
    if "prefill" in wanted:
        time_prefill()


if __name__ == "__main__":
    main()
