# pyright: basic, reportAttributeAccessIssue=false
"""Times the choice of tokens by chance: by the kernels, and by the torch operations that they stand for.

python benchmarks/draw_timing.py [VOCABULARY]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from timing import seconds_in_graph

from mgtp.runtime import sampling
from mgtp.runtime.kernels import use_kernels
from mgtp.runtime.sampling_params import SamplingParams

CASES: list[dict[str, Any]] = [{}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.9, "temperature": 0.6}]


def logits_of(batch: int, vocab: int, peaked: bool) -> torch.Tensor:
    """As of random weights, or as of a trained model: a few tokens far above the others."""
    logits = torch.randn(batch, vocab, device="cuda") * (2.5 if peaked else 1.3)
    if peaked:
        logits[:, torch.randperm(vocab)[:40]] += torch.linspace(0, 12, 40, device="cuda")
    return logits.bfloat16()


def measure(logits: torch.Tensor, options: dict[str, Any], kernels: bool) -> float:
    """Microseconds on the device, the likeliest token included."""
    sampling.use_kernels = use_kernels if kernels else lambda _: False
    batch, vocab = logits.shape
    draws = sampling._Draws([SamplingParams(**options, seed=i) for i in range(batch)], vocab, logits.device)
    randoms = torch.rand(batch, dtype=torch.float64, device="cuda")
    draws._randoms_ahead = lambda _: randoms
    positions = torch.zeros(batch, dtype=torch.int64)
    return 1e6 * seconds_in_graph([lambda: draws.draw(logits, positions, sampling._likeliest(logits).ids)], 5)


@torch.inference_mode()
def main() -> None:
    vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 128256
    for batch in (1, 8, 32, 128):
        for peaked in (True, False):
            logits = logits_of(batch, vocab, peaked)
            for options in CASES:
                ours, torchs = measure(logits, options, True), measure(logits, options, False)
                case = f"batch {batch}, {'peaked' if peaked else 'flat'}, {options or 'temperature 1'}"
                print(f"{case}: {ours:.1f} us, torch {torchs:.1f} us", flush=True)


if __name__ == "__main__":
    main()
