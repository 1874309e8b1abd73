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
FILTERED: list[dict[str, Any]] = [
    {"seed": 1, "top_p": 0.9},
    {"seed": 2},
    {"seed": 3, "top_k": 50, "top_p": 0.95},
    {"seed": 4, "top_k": 7, "temperature": 0.5},
    {"temperature": 0},
    {"seed": 5, "top_k": 3000, "top_p": 0.3, "min_p": 0.01},
    {"seed": 6, "top_p": 1e-9},
    {"seed": 7, "top_p": 0.999999, "temperature": 40.0},
    {"seed": 8, "top_k": 1, "top_p": 0.5},
    {"seed": 9, "top_k": 200, "temperature": 3e38},
    {"seed": 10, "top_p": 0.99, "temperature": 1e-40},
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


@pytest.mark.parametrize("options", [{}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_draw_leaves_other_rows_and_marks_nan(device, options):
    logits = rows_of(6, 5000, device)
    logits[1, 4999], logits[3], logits[4, 0] = NAN, -INF, INF
    params = [SamplingParams(temperature=float(row % 2), seed=row, **options) for row in range(6)]
    sampled = Sampler().sample(logits, params, range(6))
    assert sampled.failed.tolist() == [False, True, False, True, True, False]
    assert bool(((sampled.ids >= 0) & (sampled.ids < 5000)).all())
    assert sampled.ids[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=-1).tolist()


def test_filtered_draw_is_what_torch_draws(device, monkeypatch):
    logits = rows_of(len(FILTERED), 9001, device)
    logits[:, 9000] = -INF
    params, positions = [SamplingParams(**options) for options in FILTERED], range(len(FILTERED))
    sampled, expected = Sampler().sample(logits, params, positions), by_torch(logits, params, positions, monkeypatch)
    assert torch.equal(sampled.ids, expected.ids)


@pytest.mark.parametrize(("top_k", "top_p"), [(5000, 0.9), (777, 1.0), (777, 0.6), (5000, 1e-300), (1, 0.5)])
def test_edges_go_to_the_lower_ids_among_equals(device, top_k, top_p):
    """Ties everywhere, at the edge too, over several blocks: the tokens that are kept are those that torch keeps."""
    from mgtp.runtime.kernels.edges import find_edges

    logits = rows_of(3, 5000, device).round() * torch.tensor([[0.1], [1.0], [4.0]], device=device)
    logits[2, :4000] = -INF
    ids, rows, temperatures = logits.argmax(dim=-1), torch.arange(3, device=device), torch.ones(3, 1, device=device)
    top_ks = torch.full((3, 1), top_k, device=device)
    top_ps = torch.full((3, 1), top_p, dtype=torch.float64, device=device)
    edges, num_kept = find_edges(logits, ids, rows, temperatures, top_ks, top_ps)
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    keys = scaled.abs().view(torch.int32)
    equal = keys == edges[:, None]
    kept = (keys < edges[:, None]) | (equal & (equal.cumsum(dim=-1) <= num_kept[:, None]))
    possible = sampling.weigh(scaled) > 0
    assert torch.equal(kept & possible, sampling.likeliest(scaled, top_ks, top_ps, 5000) & possible)
