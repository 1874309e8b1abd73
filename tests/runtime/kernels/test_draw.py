"""Drawing by the kernels gives what drawing by torch's operations gives, in any batch and however rows are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgtp.runtime import sampling
from mgtp.runtime.sampling import Sampler
from mgtp.runtime.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")
KINDS: list[dict[str, Any]] = [
    {"seed": 1},
    {"temperature": 0},
    {"seed": 2, "temperature": 1e-40},
    {"seed": 3, "temperature": 3e38},
    {"seed": 4, "temperature": 0.6, "min_p": 0.05},
    {"seed": 5, "temperature": 1.7},
]


def rows_of(count: int, vocab: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(device, dtype)


def by_torch(logits, params, positions, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "use_kernels", lambda _: False)
        return Sampler().sample(logits, params, positions)


@pytest.mark.parametrize(("count", "vocab"), [(129, 331), (7, 4096), (5, 9001), (1, 9001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_draw_is_what_torch_draws(device, count, vocab, dtype, monkeypatch):
    logits = rows_of(count, vocab, device, dtype)
    logits[:, vocab - 5 :] = -INF
    params = [SamplingParams(**KINDS[(row + 4) % len(KINDS)]) for row in range(count)]
    positions = [3 * row for row in range(count)]
    sampled, expected = Sampler().sample(logits, params, positions), by_torch(logits, params, positions, monkeypatch)
    assert torch.equal(sampled.ids, expected.ids)
    assert not sampled.failed.any()


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    return sampling.weigh(logits.float() - logits.float().amax(dim=-1, keepdim=True))


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_draw_at_the_ends_and_among_equals(device, number):
    """Weights that every exp() gives alike: the place is exact."""
    from mgtp.runtime.kernels.draw import draw

    logits = torch.full((4, 10_001), -INF, device=device)
    logits[0] = 2.0
    logits[1, [0, 4095, 4096, 10_000]] = -7.5
    logits[2, 5000] = 1.0
    logits[3, 17:9000] = 0.0
    ids, rows = logits.argmax(dim=-1), torch.arange(4, device=device)
    randoms, ones = torch.full((4,), number, dtype=torch.float64, device=device), torch.ones(4, device=device)
    expected = sampling.pick(weights_of(logits), randoms)
    draw(logits, ids, rows, randoms, ones, torch.zeros_like(rows))
    assert torch.equal(ids, expected)


def test_draw_leaves_other_rows_and_marks_nan(device):
    logits = rows_of(6, 5000, device)
    logits[1, 4999], logits[3], logits[4, 0] = NAN, -INF, INF
    params = [SamplingParams(temperature=float(row % 2), seed=row) for row in range(6)]
    sampled = Sampler().sample(logits, params, range(6))
    assert sampled.failed.tolist() == [False, True, False, True, True, False]
    assert bool(((sampled.ids >= 0) & (sampled.ids < 5000)).all())
    assert sampled.ids[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=-1).tolist()
