"""Times ways to write one large product: cuBLAS picks its kernel by heuristics that depend on the form."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timing import seconds_in_graph


def main() -> None:
    for library in ("cublaslt", "cublas"):
        torch.backends.cuda.preferred_blas_library(library)
        for tokens in (512, 2048, 8000, 8192):
            for rows, columns in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
                x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
                w = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02
                out = x.new_empty(tokens, rows)
                zero = x.new_zeros(rows)
                ways = {
                    "linear": partial(F.linear, x, w),
                    "mm": partial(torch.mm, x, w.t(), out=out),
                    "bias": partial(F.linear, x, w, zero),
                    "transposed": partial(torch.mm, w, x.t()),
                    "halves of rows": lambda w=w, x=x: [F.linear(x, part) for part in w.chunk(2)],
                    "halves of tokens": lambda w=w, x=x, o=out: [
                        torch.mm(a, w.t(), out=b) for a, b in zip(x.chunk(2), o.chunk(2), strict=True)
                    ],
                }
                flops = 2 * tokens * rows * columns
                shown = []
                for name, call in ways.items():
                    took = seconds_in_graph([call], 6)
                    shown.append(f"{name} {took * 1e6:.0f} us {flops / took / 1e12:.0f}")
                print(f"{library} {tokens} x {rows} x {columns}: " + " | ".join(shown), flush=True)


if __name__ == "__main__":
    main()
